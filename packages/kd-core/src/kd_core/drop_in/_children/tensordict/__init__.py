"""What a child process of a program under the drop-in imports as `tensordict`.

The folder above is on the search path of children. This module installs the drop-in there, and
makes way for it.
"""

import sys

from kd_core.drop_in import install

del sys.modules[__name__]
install()
__import__(__name__)
