"""Trained draft layers that read several layers of the target; one pass computes a state per position.

    context, all tokens read so far:   c_s = hidden_norm(fc [aux_s of m target layers]); keys and values of c_s
    queries of a window after t:       [x_1, mask, mask, ...] at positions t + 1, t + 2, ...
    a layer (Qwen3's):                 queries read the context up to t and, in both directions, one another
    states:                            norm(queries after the last layer), [n, D]

As in DFlash, one pass over a block reads the target's states as keys and values; here leaves and a circuit follow. Its
sums are linear in the state of the first query. `sample_from_anchor` (DSpark's layout): n - 1 queries
[x_1, n - 2 masks], each for the *next* token: states [n - 1, D].

aux: the residual stream after the layers `aux_hidden_state_layer_ids` of the target (0: the embeddings). In training a
text's context is computed once and its windows are blocks of one pass (`BackboneTrunk.read`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from vllm_mtpc.heads.sections import MAX_LIST, MAX_WIDTH, Section
from vllm_mtpc.heads.trunk.base import Trunk, Windows, document_positions

KeysValues = tuple[Tensor, Tensor]  # [B, kv heads, S, head_dim] each
CONTEXT_PER_QUERY = 4  # minimum keys of context per query of a pass
SMALL = 0.1  # factor of a new layer's output projections
INIT_STD = 0.01
MAX_AUX = 5  # default number of the target's layers that are read

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


def aux_layers(target: Mapping[str, Any]) -> list[int]:
    """Return up to five layers from the second to the third last, as DFlash reads them; all of a small target."""
    layers = target.get("num_hidden_layers") or 1
    first, last = (2, layers - 2) if layers > 4 else (1, layers)
    steps = min(MAX_AUX, last - first + 1) - 1
    return [first + round(step * (last - first) / max(1, steps)) for step in range(steps + 1)]


class BackboneOptions(Section):
    """Section of `config.json`."""

    kind: Literal["backbone"] = Field(description="trained draft layers over states of several layers")
    layers: int = Field(ge=1, le=5, description="draft layers (default: 2)")
    heads: Width = Field(description="attention heads of a draft layer (default: the target's)")
    kv_heads: Width = Field(description="key and value heads of a draft layer (default: the target's)")
    head_dim: int = Field(ge=2, le=MAX_WIDTH, multiple_of=2, description="width of an attention head, even")
    width: int = Field(ge=1, le=MAX_WIDTH, description="width of a draft layer's MLP (default: the target's)")
    theta: float = Field(ge=1, description="base of the rotary positions")
    eps: float = Field(ge=0, le=1, description="of the norms")
    aux_hidden_state_layer_ids: list[Annotated[int, Field(ge=0, le=4096)]] = Field(
        min_length=1, max_length=MAX_LIST, description="the target's layers that are read, from 1; 0: the embeddings"
    )
    sample_from_anchor: bool = Field(description="a query predicts the next token (DSpark), not its own (DFlash)")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        read = self.aux_hidden_state_layer_ids
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; set it to a divisor")
        if read != sorted(set(read)):
            raise ValueError(f"aux_hidden_state_layer_ids={read}: allowed are rising numbers; correct them")
        return self

    @classmethod
    def defaults(cls, target: Mapping[str, Any]) -> dict[str, Any]:
        heads = target.get("num_attention_heads") or 8
        theta = (target.get("rope_parameters") or target).get("rope_theta")
        return {
            "layers": 2,
            "heads": heads,
            "kv_heads": target.get("num_key_value_heads") or heads,
            "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
            "width": target.get("intermediate_size") or 4 * target["hidden_size"],
            "theta": float(theta) if theta else 10000.0,
            "eps": target.get("rms_norm_eps") or 1e-6,
            "aux_hidden_state_layer_ids": aux_layers(target),
            "sample_from_anchor": False,
        }


class Context(NamedTuple):
    """The keys and values of R rows of text that windows read."""

    layers: list[KeysValues]  # of each draft layer, [R, kv heads, S, head_dim]
    position: Tensor  # [R, S] int64, from 0 on in every document
    document: Tensor  # [R, S] integers


class Attention(nn.Module):
    """Attention of a decoder layer of Qwen3."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim, eps), nn.RMSNorm(head_dim, eps)

    def keys_values(self, states: Tensor, rope: Tensor) -> KeysValues:
        """Return the keys and values of states [B, S, D] at angles [B, S, head_dim / 2]."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (self.kv_heads, -1)))
        values = self.v_proj(states).unflatten(-1, (self.kv_heads, -1))
        return rotate(keys, rope).transpose(1, 2), values.transpose(1, 2)

    def forward(self, states: Tensor, rope: Tensor, context: KeysValues, mask: Tensor) -> Tensor:
        """Attend from states [B, Q, D] to the context of S tokens and to each other, where mask [B, 1, Q, S + Q]."""
        queries = self.q_norm(self.q_proj(states).unflatten(-1, (self.heads, -1)))
        pairs = zip(context, self.keys_values(states, rope), strict=True)
        keys, values = (torch.cat([before, after], 2) for before, after in pairs)
        read = F.scaled_dot_product_attention(
            rotate(queries, rope).transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(read.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated MLP of a decoder layer of Qwen3."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return the MLP of states [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """A decoder layer of Qwen3."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, width: int, eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(hidden_size, heads, kv_heads, head_dim, eps)
        self.mlp = Mlp(hidden_size, width)
        self.input_layernorm = nn.RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps)

    def forward(self, states: Tensor, rope: Tensor, context: KeysValues, mask: Tensor) -> Tensor:
        """Return the states [B, Q, D] after the layer; arguments as in Attention."""
        states = states + self.self_attn(self.input_layernorm(states), rope, context, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class Backbone(nn.Module):
    """The draft layers, which read m = `num_aux` of the target's layers, of its hidden size D; no embedding or lm_head.

    `theta` is the base of the rotary positions, `eps` that of the norms.
    """

    def __init__(self, layers: list[Layer], hidden_size: int, num_aux: int, theta: float, eps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.fc = nn.Linear(num_aux * hidden_size, hidden_size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden_size, eps), nn.RMSNorm(hidden_size, eps)
        self.mask_embedding = nn.Parameter(torch.empty(hidden_size))
        self.head_dim, self.theta = layers[0].self_attn.head_dim, theta

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise: layers that change little, other weights by torch's defaults; the context is the mean of aux."""
        for layer in self.layers:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.mul_(SMALL)
        size = len(self.mask_embedding)
        parts = self.fc.in_features // size
        self.fc.weight.normal_().mul_(INIT_STD * size**-0.5)
        self.fc.weight.add_(torch.eye(size, device=self.fc.weight.device).repeat(1, parts) / parts)
        self.mask_embedding.normal_().mul_(INIT_STD)

    def context(self, aux: Tensor, position: Tensor) -> list[KeysValues]:
        """Return each layer's keys and values of aux [B, S, m D] at position [B, S]."""
        states, rope = self.hidden_norm(self.fc(aux)), self.rope(position)
        return [layer.self_attn.keys_values(states, rope) for layer in self.layers]

    def forward(self, queries: Tensor, position: Tensor, context: list[KeysValues], mask: Tensor) -> Tensor:
        """Return the states [B, Q, D] of queries [B, Q, D] at position [B, Q], reading where mask [B, 1, Q, S + Q]."""
        states, rope = queries, self.rope(position)
        for layer, keys_values in zip(self.layers, context, strict=True):
            states = layer(states, rope, keys_values, mask)
        return self.norm(states)

    def rope(self, position: Tensor) -> Tensor:
        """Return the angles [B, S, head_dim / 2] float32 of position [B, S]."""
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=position.device)
        return position[..., None].float() * self.theta ** (-half / self.head_dim)


def rotate(states: Tensor, rope: Tensor) -> Tensor:
    """Apply rotary positions to states [B, S, heads, head_dim]; the halves of a head are pairs."""
    cos, sin = (part[:, :, None].to(states.dtype) for part in (rope.cos(), rope.sin()))
    first, second = states.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class BackboneTrunk(Trunk):
    """Parameters: `backbone.*`."""

    Options = BackboneOptions
    sees_first = needs_embedding = is_per_position = True

    def __init__(self, options: BackboneOptions, window: int, hidden_size: int) -> None:
        super().__init__(options, window, hidden_size)
        sizes = options.heads, options.kv_heads, options.head_dim, options.width, options.eps
        layers = [Layer(hidden_size, *sizes) for _ in range(options.layers)]
        self.aux_layers, self.from_anchor = tuple(options.aux_hidden_state_layer_ids), options.sample_from_anchor
        self.backbone = Backbone(layers, hidden_size, len(self.aux_layers), options.theta, options.eps)

    def reset_parameters(self) -> None:
        self.backbone.reset_parameters()

    @property
    def num_queries(self) -> int:
        """Number of queries, and so of states, of a window."""
        return self.window - self.from_anchor

    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Trunk, for states [B, num_queries, D] of `read` or of a server's pass."""
        return hidden[:, 0], hidden if self.from_anchor else hidden[:, 1:]

    def windows(self, hidden: Tensor, document: Tensor, row: Tensor, start: Tensor, first: Tensor) -> Windows:
        rows, of_row = row.unique(return_inverse=True)
        document, first = document[rows], first.clamp(min=0)
        context = self.context(hidden[rows, :, : -self.hidden_size], document_positions(document), document)
        return lambda some: self.read(context, of_row[some], start[some], first[some])

    def context(self, aux: Tensor, position: Tensor, document: Tensor) -> Context:
        """Return the context of R rows of text from aux [R, S, m D], position [R, S] and document [R, S]."""
        return Context(self.backbone.context(aux.to(self.backbone.fc.weight.dtype), position), position, document)

    def read(self, context: Context, row: Tensor, start: Tensor, first: Tensor) -> Tensor:
        """Return the states [B, n, D] of windows; up to W of a row read its context in one pass, [groups, W, n].

        The context is of R rows; row, start and first [B] as in `windows`.
        """
        length = int(start.max()) + 1  # of the context that is read
        grid = WindowGrid(row, self.num_queries, length)
        starts, queries = grid.place(start), self.queries(grid.place(first)).flatten(1, 2)
        layers = [tuple(part[:, :, :length].index_select(0, grid.rows) for part in layer) for layer in context.layers]
        mask = windows_mask(starts, context.document[grid.rows, :length], self.num_queries)
        steps = torch.arange(self.num_queries, device=row.device)
        positions = context.position[grid.rows].gather(1, starts)[..., None] + 1 + steps
        states = self.backbone(queries, positions.flatten(1), layers, mask)
        return states.view(-1, self.num_queries, self.hidden_size).index_select(0, grid.index)

    def queries(self, first: Tensor) -> Tensor:
        """Return the queries [..., n, D] of windows with x_1 = first [...]: its embedding, then masks."""
        embedded = self.embed(first).to(self.backbone.fc.weight.dtype)[..., None, :]
        masks = self.backbone.mask_embedding.expand(*first.shape, self.num_queries - 1, -1)
        return torch.cat([embedded, masks], -2)

    @property
    def window_bytes(self) -> int:
        """Approximate bytes of float32 activations of a window that a training step keeps for the backward pass."""
        attention = self.backbone.layers[0].self_attn
        heads, width = 3 * attention.heads + 4 * attention.kv_heads, self.backbone.layers[0].mlp.down_proj.in_features
        per_layer = 6 * self.hidden_size + heads * attention.head_dim + 4 * width
        return 4 * self.num_queries * len(self.backbone.layers) * per_layer


class WindowGrid:
    """Places of B windows of `length` rows in a batch of G x W: up to W windows of a packed row read it together.

    row [B] int64 is the packed row of each window, of which `context` tokens are read. With more than `max_padding`
    places for each window, every window reads alone.
    """

    def __init__(self, row: Tensor, length: int, context: int, max_padding: float = torch.inf) -> None:
        order, counts, rank = row.argsort(stable=True), torch.bincount(row), torch.empty_like(row)
        count, index = len(row), torch.arange(len(row), device=row.device)
        rank[order] = index - (counts.cumsum(0) - counts)[row[order]]  # of a window among those of its row
        self.width = max(1, min(context // (CONTEXT_PER_QUERY * length), int(rank.max()) + 1))
        groups, place = (row * count + rank // self.width).unique(return_inverse=True)
        self.rows, self.index = groups // count, place * self.width + rank % self.width  # [G] of packed rows, [B]
        if len(groups) * self.width > max_padding * count:
            self.rows, self.width, self.index = row, 1, index

    def place(self, values: Tensor) -> Tensor:
        """Return values [B, ...] of windows as [G, W, ...]; padding is zero."""
        placed = values.new_zeros(len(self.rows) * self.width, *values.shape[1:])
        return placed.index_copy(0, self.index, values).unflatten(0, (-1, self.width))


def windows_mask(starts: Tensor, document: Tensor, num_queries: int) -> Tensor:
    """Return which keys queries read [R, 1, W n, S + W n]: their document's context up to their start, their window.

    starts [R, W] int64: index of the last context token of each window; document [R, S]: of the context.
    """
    before = torch.arange(document.shape[1], device=starts.device) <= starts[..., None]  # [R, W, S]
    before &= document[:, None] == document.gather(1, starts)[..., None]
    same = torch.eye(starts.shape[1], dtype=torch.bool, device=starts.device).expand(len(starts), -1, -1)
    both = torch.cat([before, same.repeat_interleave(num_queries, 2)], 2)
    return both.repeat_interleave(num_queries, 1)[:, None]
