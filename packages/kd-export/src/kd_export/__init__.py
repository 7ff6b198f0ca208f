"""From a keyed module to a verified artefact that runs anywhere.

Importing this package imports no torch: `inspect`, and running an ONNX file, work without it.
"""

from ._backend import Backend as Backend
from ._backend import Runner as Runner
from ._backend import backends as backends
from ._backend import register_backend as register_backend
from ._errors import BackendMissing as BackendMissing
from ._errors import DtypeMismatch as DtypeMismatch
from ._errors import ExportError as ExportError
from ._errors import KeyMismatch as KeyMismatch
from ._errors import NotExportable as NotExportable
from ._errors import SchemaVersion as SchemaVersion
from ._errors import ShapeMismatch as ShapeMismatch
from ._errors import Specialized as Specialized
from ._errors import UntrustedArtifact as UntrustedArtifact
from ._errors import VerifyError as VerifyError
from ._export import export as export
from ._export import save as save
from ._program import KeyedProgram as KeyedProgram
from ._schema import Axis as Axis
from ._schema import Entry as Entry
from ._schema import Schema as Schema
from ._schema import Vector as Vector
from ._session import Session as Session
from ._session import inspect as inspect
from ._session import open as open  # noqa: A004  # read as `kd_export.open`
from ._verify import Comparison as Comparison
from ._verify import Report as Report
from ._verify import verify as verify

__version__ = "0.1.0"
