"""Trained policies of other frameworks, with all that stands around their networks."""

from typing import TYPE_CHECKING

from kd_core.extending import publish as _publish
from kd_export.policies._policy import Policy as Policy

if TYPE_CHECKING:
    from kd_export.policies._rl_games import from_rl_games as from_rl_games
    from kd_export.policies._rsl_rl import from_rsl_rl as from_rsl_rl
    from kd_export.policies._skrl import from_skrl as from_skrl
    from kd_export.policies._spaces import from_gymnasium as from_gymnasium
    from kd_export.policies._stable_baselines3 import from_sb3 as from_sb3
    from kd_export.policies._steps import Above as Above
    from kd_export.policies._steps import Affine as Affine
    from kd_export.policies._steps import ArgMax as ArgMax
    from kd_export.policies._steps import ChannelsFirst as ChannelsFirst
    from kd_export.policies._steps import Clip as Clip
    from kd_export.policies._steps import Normalise as Normalise
    from kd_export.policies._steps import OneHot as OneHot
    from kd_export.policies._steps import Recurrent as Recurrent
    from kd_export.policies._steps import ScaleImage as ScaleImage
    from kd_export.policies._steps import Shaped as Shaped
    from kd_export.policies._steps import ToFloat as ToFloat
    from kd_export.policies._steps import Unscale as Unscale
    from kd_export.policies._tianshou import from_tianshou as from_tianshou
    from kd_export.policies._torchrl import Concatenate as Concatenate
    from kd_export.policies._torchrl import from_torchrl as from_torchrl

_publish(
    __name__,
    later={
        "kd_export.policies._rl_games": "from_rl_games",
        "kd_export.policies._rsl_rl": "from_rsl_rl",
        "kd_export.policies._skrl": "from_skrl",
        "kd_export.policies._spaces": "from_gymnasium",
        "kd_export.policies._stable_baselines3": "from_sb3",
        "kd_export.policies._steps": (
            "Above Affine ArgMax ChannelsFirst Clip Normalise OneHot Recurrent ScaleImage Shaped "
            "ToFloat Unscale"
        ),
        "kd_export.policies._tianshou": "from_tianshou",
        "kd_export.policies._torchrl": "Concatenate from_torchrl",
    },
)
