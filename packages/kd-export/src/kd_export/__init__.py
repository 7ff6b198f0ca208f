"""From a keyed module to a verified artefact that runs anywhere.

Importing this package imports no torch: `inspect`, and running an ONNX file, work without it.
"""

from kd_export._errors import BackendMissing as BackendMissing
from kd_export._errors import DtypeMismatch as DtypeMismatch
from kd_export._errors import ExportError as ExportError
from kd_export._errors import KeyMismatch as KeyMismatch
from kd_export._errors import NotExportable as NotExportable
from kd_export._errors import SchemaVersion as SchemaVersion
from kd_export._errors import ShapeMismatch as ShapeMismatch
from kd_export._errors import Specialized as Specialized
from kd_export._errors import UntrustedArtifact as UntrustedArtifact
from kd_export._errors import VerifyError as VerifyError
from kd_export._errors import publish as _publish
from kd_export._export import Diagnosis as Diagnosis
from kd_export._export import Finding as Finding
from kd_export._export import Timing as Timing
from kd_export._export import benchmark as benchmark
from kd_export._export import diagnose as diagnose
from kd_export._export import export as export
from kd_export._export import save as save
from kd_export._export import verify as verify
from kd_export._precision import adopt as adopt
from kd_export._program import KeyedProgram as KeyedProgram
from kd_export._program import convert as convert
from kd_export._running.loading import diff as diff
from kd_export._running.loading import inspect as inspect
from kd_export._running.loading import open as open  # noqa: A004  # read as `kd_export.open`
from kd_export._running.session import Backend as Backend
from kd_export._running.session import Runner as Runner
from kd_export._running.session import Session as Session
from kd_export._running.session import backends as backends
from kd_export._running.session import register_backend as register_backend
from kd_export._schema.differences import Difference as Difference
from kd_export._schema.differences import Differences as Differences
from kd_export._schema.schema import Axis as Axis
from kd_export._schema.schema import Budget as Budget
from kd_export._schema.schema import Entry as Entry
from kd_export._schema.schema import Precision as Precision
from kd_export._schema.schema import Schema as Schema
from kd_export._schema.schema import Signal as Signal
from kd_export._schema.schema import Step as Step
from kd_export._schema.schema import Vector as Vector
from kd_export._verification.comparison import Comparison as Comparison
from kd_export._verification.comparison import Deviation as Deviation
from kd_export._verification.comparison import Latency as Latency
from kd_export._verification.comparison import Reduction as Reduction
from kd_export._verification.comparison import Report as Report

__version__ = "0.1.0"

_publish(__name__)
