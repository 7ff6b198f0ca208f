"""Private names that pickles of modules carry, under this path: keep them when their code moves."""

from kd_core.extending import publish
from kd_probabilistic._distribution import Construction as Construction
from kd_probabilistic._module import Settings as Settings

publish(__name__)
