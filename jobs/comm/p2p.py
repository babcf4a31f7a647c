"""Exchange around a ring of ranks. Starts transfers; what is computed meanwhile is not its business."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from jobs.comm.groups import Axis


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way to the next rank of a ring, and the one that comes from the previous rank."""

    sent: torch.Tensor
    received: torch.Tensor
    pending: list[dist.Work]

    def wait(self) -> torch.Tensor:
        """What the previous rank sent; from here on `sent` may be changed."""
        for work in self.pending:
            work.wait()
        return self.received


def pass_on(tensor: torch.Tensor, ring: Axis) -> Transfer:
    """Start to send `tensor` to the next rank and to receive the previous rank's, of the same shape and type.

    Collective over the ring. Returns at once: neither the tensor nor the result may be touched before
    `Transfer.wait`.

    Raises:
        ValueError: the ring is one rank.
    """
    if ring.group is None:
        raise ValueError("a ring of one rank has nobody to pass a tensor to; use the tensor as it is")
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    pending = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, ring.neighbour(1), ring.group),
            dist.P2POp(dist.irecv, received, ring.neighbour(-1), ring.group),
        ]
    )
    return Transfer(sent, received, pending)
