"""Trained policies of other frameworks, with all that stands around their networks."""

from typing import TYPE_CHECKING

from kd_core.extending import publish as _publish
from kd_export.policies._policy import Policy as Policy

if TYPE_CHECKING:
    from kd_export.policies._isaac_lab import from_rl_games as from_rl_games
    from kd_export.policies._isaac_lab import from_rsl_rl as from_rsl_rl
    from kd_export.policies._isaac_lab import from_skrl as from_skrl
    from kd_export.policies._lerobot import from_lerobot as from_lerobot
    from kd_export.policies._policy import Above as Above
    from kd_export.policies._policy import Affine as Affine
    from kd_export.policies._policy import ArgMax as ArgMax
    from kd_export.policies._policy import ChannelsFirst as ChannelsFirst
    from kd_export.policies._policy import Clip as Clip
    from kd_export.policies._policy import Normalise as Normalise
    from kd_export.policies._policy import OneHot as OneHot
    from kd_export.policies._policy import Recurrent as Recurrent
    from kd_export.policies._policy import ScaleImage as ScaleImage
    from kd_export.policies._policy import Shaped as Shaped
    from kd_export.policies._policy import ToFloat as ToFloat
    from kd_export.policies._policy import Unscale as Unscale
    from kd_export.policies._policy import from_gymnasium as from_gymnasium
    from kd_export.policies._stable_baselines3 import from_sb3 as from_sb3
    from kd_export.policies._tianshou import from_tianshou as from_tianshou
    from kd_export.policies._torchrl import Concatenate as Concatenate
    from kd_export.policies._torchrl import from_torchrl as from_torchrl

_publish(
    __name__,
    later={
        "kd_export.policies._isaac_lab": "from_rl_games from_rsl_rl from_skrl",
        "kd_export.policies._lerobot": "from_lerobot",
        "kd_export.policies._policy": (
            "Above Affine ArgMax ChannelsFirst Clip from_gymnasium Normalise OneHot Recurrent "
            "ScaleImage Shaped ToFloat Unscale"
        ),
        "kd_export.policies._stable_baselines3": "from_sb3",
        "kd_export.policies._tianshou": "from_tianshou",
        "kd_export.policies._torchrl": "Concatenate from_torchrl",
    },
)
