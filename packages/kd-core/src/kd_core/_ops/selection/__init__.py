"""Parts of a batch: indices, masks, splits; what values mean it must not know."""
