"""A policy's log-probabilities of completions, by the cheapest way that is right for its architecture.

Where the architecture allows it, sequences lie one behind the other without padding, with the prompt of a group there
once, and the last layer is computed for completion tokens alone, slice by slice. Both are tried on the model itself
first; an architecture for which one of them gives other figures gets padded rows, or its own last layer, instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from echo2p2p.learning.batching import MicroBatch, Row, collate, pack
from echo2p2p.learning.head import head_logprobs
from echo2p2p.learning.objective import chosen_logprobs
from echo2p2p.learning.packed import TOLERANCE, use_packing


class PolicyForward:
    """One model, ready to be asked for log-probabilities.

    Args:
        model: of transformers; its attention is replaced if it can be packed.
        temperature: of the sampling.
        compute_dtype: of the matrix products.
        micro_batch_tokens: token places in one pass: tokens where ``packs``, else rows × the longest.
        logit_bytes: of logits that may be kept from the forward to the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        compute_dtype: torch.dtype,
        micro_batch_tokens: int,
        logit_bytes: int,
    ) -> None:
        self.model: Any = model
        self._temperature = temperature
        self._dtype = compute_dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._logit_bytes = logit_bytes
        # Tried in float32 where the weights are, whatever is computed in later: other figures then show.
        low = next(self.model.parameters()).dtype != torch.float32
        with torch.autocast(self.device.type, compute_dtype, enabled=low):
            # First, while its attention takes a plain row.
            self.slices = _has_plain_head(self.model, self.device)
            """Whether the last layer is computed slice by slice."""
            self.packs = use_packing(model, self.device)
            """Whether sequences are packed without padding."""

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def micro_batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[Row], MicroBatch]]:
        """``rows`` in parts of at most ``micro_batch_tokens``, or one row."""
        for part in pack(rows, self._micro_batch_tokens, padded=not self.packs):
            yield part, collate(part, self.device, padded=not self.packs)

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the batch's trained tokens, float32, (tokens,) each."""
        low = self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=low):
            if self.slices:
                with self._sliced(batch):
                    both = self._predicted(batch, self._output(batch))
                return both[:, 0], both[:, 1].detach()
            logits = self._predicted(batch, self._output(batch))
        return chosen_logprobs(logits, batch.targets, self._temperature)

    @torch.no_grad()
    def of_rows(self, rows: Sequence[Row]) -> dict[int, Tensor]:
        """Log-probabilities of each row's trained tokens, by the row's ``id``, without gradients."""
        found = {}
        for part, batch in self.micro_batches(rows):
            lengths = [row.n_trained for row in part]
            logprobs = torch.split(self(batch)[0], lengths)
            found.update({id(row): own for row, own in zip(part, logprobs, strict=True)})
        return found

    def _output(self, batch: MicroBatch) -> Tensor:
        """What the model's last layer makes of the last places: its logits, usually."""
        keep = batch.at if self.packs else batch.keep
        output = self.model(**batch.inputs, use_cache=False, logits_to_keep=keep)
        return cast("Tensor", output.logits)

    def _predicted(self, batch: MicroBatch, values: Tensor) -> Tensor:
        """Of ``values``, which the model returned, those of the predicting places: (tokens, …)."""
        if values.shape[:-1] == (1, len(batch.at)):
            return values[0]
        width = batch.inputs["input_ids"].shape[1]
        return values[batch.at // width, batch.at % width - (width - batch.keep)]

    @contextmanager
    def _sliced(self, batch: MicroBatch) -> Iterator[None]:
        """The model's last layer returns (log-probability, entropy) of each target instead of logits.

        It is replaced where it stands, within the model: its weights may be spread over several processes, and are
        together only while the model runs.
        """
        head = self.model.get_output_embeddings()

        def forward(hidden: Tensor) -> Tensor:
            found = head_logprobs(
                self._predicted(batch, hidden),
                head.weight,
                batch.targets,
                temperature=self._temperature,
                dtype=self._dtype,
                kept_bytes=self._logit_bytes,
            )
            # No view: what FSDP hooks onto it would be lost.
            return torch.stack([each[None] for each in found], dim=-1)

        head.forward = forward
        try:
            yield
        finally:
            del head.forward


@torch.no_grad()
def _has_plain_head(model: Any, device: torch.device) -> bool:
    """Whether the logits are the last hidden state times the output embedding, and nothing else."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        return False
    ids = torch.arange(min(8, head.weight.shape[0]), device=device)[None]
    try:
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    except (AttributeError, TypeError):
        return False
    tolerance = TOLERANCE[expected.dtype]
    return torch.allclose(
        hidden.to(expected.dtype) @ head.weight.to(expected.dtype).T, expected, atol=tolerance, rtol=tolerance
    )
