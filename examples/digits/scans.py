"""The scans: 1 797 real handwritten digits of 8 x 8 pixels, 360 of them held out."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from kd_core import TensorDict

HELD_OUT = 360


def load_scans() -> tuple[TensorDict, TensorDict]:
    """Load the scans that come inside scikit-learn.

    Returns:
        Training and held-out scans: `image` in [0, 1] of shape (n, 8, 8), `label` of shape (n,).
    """
    digits = load_digits()
    scans = TensorDict(
        {
            "image": torch.tensor(digits.images, dtype=torch.float32) / 16,
            "label": torch.tensor(digits.target),
        },
        batch_size=[len(digits.target)],
    )
    train, test = train_test_split(
        range(len(scans)), test_size=HELD_OUT, stratify=digits.target, random_state=0
    )
    return scans[torch.tensor(train)], scans[torch.tensor(test)]
