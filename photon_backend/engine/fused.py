"""The text model through our kernels: about five launches a layer instead of some fifteen (decode) or 25 (prefill).

The block is parallel, so two linears a layer are enough: [qkv ; fc1] on the normed input, and [proj | fc2] on the
concatenation of attention output and MLP hidden. Around them: the seam (sum of split-K parts, bias, residual,
LayerNorm) and attention (rope, KV write, paged attention). The few rows of a decode step go through our own linears,
which stream the weights; the many of a prefill through the library's. The model's own parameters become views of the
merged ones, so no weight exists twice.

The slow path is `Text.forward` with `PagedDecode` or `PagedPrefill`; tests compare the two.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn

from photon_backend.engine.kv_cache import KVCache
from photon_backend.kernels.attention import DecodeAttention
from photon_backend.kernels.linear import linear, linear_split
from photon_backend.kernels.norm import add_norm
from photon_backend.kernels.prefill import Packed, attend, spread
from photon_backend.model.text import Text, TextBlock, rope_tables


class _MergedBlock:
    """Merged weights of a block; the block's own linears are views of them from now on."""

    def __init__(self, block: TextBlock) -> None:
        attn, mlp = block.attn, block.mlp
        self.ln = block.ln
        self.w_in = torch.cat([attn.qkv.weight, mlp.fc1.weight])  # [qkv + F, D]
        self.b_in = torch.cat([attn.qkv.bias, mlp.fc1.bias])
        self.w_out = torch.cat([attn.proj.weight, mlp.fc2.weight], 1)  # [D, D + F]
        self.b_out = attn.proj.bias + mlp.fc2.bias
        self.num_qkv = attn.qkv.weight.shape[0]
        width = attn.proj.weight.shape[1]
        attn.qkv.weight, mlp.fc1.weight = _view(self.w_in[: self.num_qkv]), _view(self.w_in[self.num_qkv :])
        attn.proj.weight, mlp.fc2.weight = _view(self.w_out[:, :width]), _view(self.w_out[:, width:])


def _view(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class FusedText:
    """On a GPU, in a 16-bit dtype, with a head width that is a power of two from 16 to 256: see `supports`."""

    def __init__(self, text: Text, cache: KVCache) -> None:
        config, self.cache = text.config, cache
        self.config = config
        self.post_ln = text.post_ln
        self.lm_head = text.lm_head
        self.blocks = [_MergedBlock(block) for block in text.blocks]  # type: ignore[arg-type]
        every = torch.arange(config.max_context, device=text.wte.device)
        cos, sin = rope_tables(every, config)
        self.rope = (cos[:, 0].contiguous(), sin[:, 0].contiguous())
        self._attention: dict[int, DecodeAttention] = {}

    @staticmethod
    def supports(text: Text) -> bool:
        sixteen_bit = text.wte.dtype in (torch.bfloat16, torch.float16)
        power_of_two = text.config.head_dim & (text.config.head_dim - 1) == 0
        # narrower, and there is no product of matrices; wider, and a block of keys and values fits in no chip
        return text.wte.device.type == "cuda" and sixteen_bit and power_of_two and 16 <= text.config.head_dim <= 256

    def forward(self, x: Tensor, positions: Tensor, pages: Tensor, logits: Tensor) -> None:
        """One position further for each row.

        x [B, D]: inputs; afterwards the hidden state before the final LN. positions int64 [B]; pages int64 [B, P] of
        each row. Writes logits float32 [B, V].
        """
        batch, width = x.shape
        num_qkv, num_in = self.blocks[0].num_qkv, self.blocks[0].w_in.shape[0]
        attention = self._attention_for(batch)
        work = x.new_empty(batch, num_in + width)  # qkv | attention output | MLP hidden
        attended, joined = work[:, num_qkv : num_qkv + width], work[:, num_qkv:]
        normed = torch.empty_like(x)
        sums = x.new_empty(_splits(width), batch, width, dtype=torch.float32)
        parts, bias = None, self.blocks[0].b_out
        for layer, block in enumerate(self.blocks):
            add_norm(x, parts, bias, block.ln.weight, block.ln.bias, normed)
            linear(normed, block.w_in, block.b_in, work, gelu_from=num_qkv, gap=width)
            attention(work, *self.cache.flat(layer), positions, pages, self.rope, attended, ahead=layer > 0)
            parts, bias = linear_split(joined, block.w_out, sums, late=width), block.b_out
        add_norm(x, parts, bias, self.post_ln.weight, self.post_ln.bias, normed)
        linear(normed, self.lm_head.weight, self.lm_head.bias, logits)

    def prefill_layers(self, x: Tensor, packed: Packed, page_table: Tensor) -> tuple[Tensor, Tensor]:
        """New positions of several sequences, whose keys and values go to their pages. Five launches a layer.

        x [T, D]: inputs, overwritten; page_table int64 [rows, pages]. Returns x and parts [1, T, D], from which
        `prefill_head` goes on. Every shape depends on the numbers of tokens and blocks alone.
        """
        heads, page_size = self.config.n_heads, self.cache.page_size
        normed, joined = torch.empty_like(x), x.new_empty(len(x), self.blocks[0].w_out.shape[1])
        parts, bias = None, self.blocks[0].b_out
        for layer, block in enumerate(self.blocks):
            pages = self.cache.flat(layer)
            add_norm(x, parts, bias, block.ln.weight, block.ln.bias, normed)
            merged = torch.addmm(block.b_in, normed, block.w_in.t())
            spread(merged, joined, *pages, packed, page_table, self.rope, heads, page_size)
            attend(joined, *pages, packed, page_table, heads, page_size)
            parts, bias = torch.mm(joined, block.w_out.t())[None], block.b_out
        assert parts is not None
        return x, parts

    def prefill_head(self, x: Tensor, parts: Tensor, last: Tensor, hidden: Tensor, logits: Tensor) -> None:
        """x [T, D], parts [1, T, D]: what `prefill_layers` gave; last int64 [sequences]: the last token of each.

        Of these writes hidden [sequences, D], before the final LN, and logits float32 [sequences, V].
        """
        hidden.copy_(x[last])
        normed = torch.empty_like(hidden)
        bias = self.blocks[-1].b_out
        add_norm(hidden, parts[:, last], bias, self.post_ln.weight, self.post_ln.bias, normed)
        linear(normed, self.lm_head.weight, self.lm_head.bias, logits)

    def _attention_for(self, batch: int) -> DecodeAttention:
        if batch not in self._attention:
            c = self.config
            self._attention[batch] = DecodeAttention(
                batch, c.n_heads, c.n_kv_heads, c.head_dim, self.cache.page_size, self.cache.k.device
            )
        return self._attention[batch]


def _splits(outputs: int) -> int:
    """A program for about each of the chip's 132 multiprocessors, at most 16 parts to add up."""
    return max(1, min(16, triton.next_power_of_2(128 // triton.cdiv(outputs, 64))))
