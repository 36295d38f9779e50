"""Whether one rounding of a model's logits is as near to them as another one."""

from torch import Tensor


def is_as_near(errors: Tensor, others: Tensor) -> bool:
    """Whether the errors of one path at each position are at most a quarter larger than those of the other path.

    Where two experts nearly tie, rounding decides between them, which changes a position and those after it by much more
    than rounding itself. Such positions are in one path or the other, by processor, so the nearer half of the positions may
    decide in place of all.
    """
    half = errors.numel() // 2
    nearer = (each.flatten().sort().values[:half].norm() for each in (errors, others))
    return bool(errors.norm() < 1.25 * others.norm()) or next(nearer) < 1.25 * next(nearer)
