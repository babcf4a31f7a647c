"""Draws the pictures of docs/parallelism.md; `python docs/img/draw_parallelism.py` writes the SVG files.

Every picture shows who holds what (boxes, one colour a rank) and who sends what (arrows).
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

RANKS = ("r0", "r1", "r2", "r3")
STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #1f2328; }
    .title { font-weight: 600; font-size: 14px; }
    .small { font-size: 11.5px; fill: #59636e; }
    .r0 { fill: #ddf4ff; stroke: #0969da; } .r1 { fill: #dafbe1; stroke: #1a7f37; }
    .r2 { fill: #fff8c5; stroke: #9a6700; } .r3 { fill: #ffebe9; stroke: #cf222e; }
    .none { fill: #f6f8fa; stroke: #8c959f; }
    .line { fill: none; stroke: #59636e; stroke-width: 1.4; } .dash { stroke-dasharray: 5 4; }
    .head { fill: #59636e; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .small { fill: #9198a1; }
      .r0 { fill: #0c2d4d; stroke: #4493f8; } .r1 { fill: #12361f; stroke: #3fb950; }
      .r2 { fill: #3b2f0b; stroke: #d29922; } .r3 { fill: #4c1a1d; stroke: #f85149; }
      .none { fill: #151b23; stroke: #656c76; } .line { stroke: #9198a1; } .head { fill: #9198a1; }
    }"""


@dataclass
class Picture:
    """One SVG file on its way."""

    name: str
    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, kind: str = "none", text: str = "") -> None:
        """A rectangle with a text in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 4.5, text, anchor="middle")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text."""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        """A line with a head at its second end."""
        self.parts.append(
            f'<path class="line {kind}" d="M{x1:g} {y1:g} L{x2:g} {y2:g}" marker-end="url(#to)"/>'
        )

    def save(self, folder: Path) -> None:
        """Write the file."""
        body = "\n  ".join(self.parts)
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t">\n'
            f'  <title id="t">{escape(self.title)}</title>\n  <style>{STYLE}\n  </style>\n'
            '  <defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
            f"  {body}\n</svg>\n"
        )
        (folder / f"{self.name}.svg").write_text(text, encoding="ascii")


def data() -> Picture:
    """Batch cut, weights copied, gradients all-reduced."""
    p = Picture(
        "parallel_dp", "Data parallelism: the batch is cut, gradients are summed over all ranks", 760, 236
    )
    for r, kind in enumerate(RANKS):
        y = 30 + 46 * r
        p.box(10, y, 90, 34, kind, f"rows B{r}")
        p.arrow(100, y + 17, 150, y + 17)
        p.box(152, y, 180, 34, kind, "all weights W")
        p.arrow(332, y + 17, 382, y + 17)
        p.box(384, y, 90, 34, kind, f"grad {r}")
        p.arrow(474, y + 17, 530, y + 17)
        p.box(612, y, 138, 34, kind, "mean grad, step")
        p.arrow(572, y + 17, 610, y + 17)
    p.box(532, 30, 40, 172, "none", "sum")
    p.text(10, 20, "batch", "small")
    p.text(152, 20, "every rank: weights, gradients, moments whole", "small")
    p.text(500, 224, "all-reduce: 2 (n-1)/n P elements a rank", "small")
    return p


def zero() -> Picture:
    """Who holds what under stages 0 to 3."""
    p = Picture("parallel_zero", "ZeRO: what rank 1 of 4 holds under each stage", 760, 250)
    columns = (("weights", 1 / 6), ("gradients", 1 / 6), ("master, moments", 4 / 6))
    for stage in range(4):
        y = 34 + 50 * stage
        p.text(10, y + 22, f"stage {stage}", "title")
        x = 80.0
        for i, (name, share) in enumerate(columns):
            width = 560 * share
            is_cut = stage >= 3 - i
            p.box(x, y, width, 34, "none")
            if is_cut:
                p.box(x + width / 4, y, width / 4, 34, "r1")
            else:
                p.box(x, y, width, 34, "r1", name if width > 100 else "")
            if stage == 0:
                p.text(x, 24, name, "small")
            x += width + 6
        p.text(x + 4, y + 22, ("2 P", "2 P", "2 P", "3 P")[stage])
    p.text(656, 24, "moved", "small")
    p.text(80, 244, "filled: held by rank 1; empty: held by the other ranks", "small")
    return p


def tensor() -> Picture:
    """Columns, then rows."""
    p = Picture("parallel_tp", "Tensor parallelism: columns then rows, f and g around them", 800, 272)
    p.text(10, 20, "whole on every rank", "small")
    p.box(10, 70, 70, 90, "none", "X")
    p.box(96, 92, 30, 46, "none", "f")
    for r, kind in enumerate(RANKS[:2]):
        y = 36 + 96 * r
        p.arrow(126, 115, 168, y + 32)
        p.box(170, y, 44, 64, kind, f"A{r}")
        p.text(170, y + 82, "columns", "small")
        p.arrow(214, y + 32, 252, y + 32)
        p.box(254, y, 130, 64, kind, f"gelu(X A{r})")
        p.arrow(384, y + 32, 422, y + 32)
        p.box(424, y + 14, 110, 36, kind, f"B{r}")
        p.text(424, y + 66, "rows", "small")
        p.arrow(534, y + 32, 596, 115)
    p.box(598, 92, 30, 46, "none", "g")
    p.arrow(628, 115, 660, 115)
    p.box(662, 70, 128, 90, "none", "Y = sum of parts")
    p.arrow(80, 115, 94, 115)
    p.text(
        10, 214, "f: forward nothing, backward all-reduce of dX (jobs/comm/collectives.py: enter)", "small"
    )
    p.text(10, 262, "g: forward all-reduce of Y, backward nothing (leave)", "small")
    return p


def sequence() -> Picture:
    """The residual stream cut over tokens."""
    p = Picture(
        "parallel_sp", "Sequence parallelism: tokens cut between the products, matrices inside", 800, 190
    )
    for r, kind in enumerate(RANKS[:2]):
        y = 34 + 64 * r
        p.box(10, y, 120, 44, kind, f"tokens {r}: x")
        p.arrow(130, y + 22, 158, y + 22)
        p.box(160, y, 80, 44, kind, "norm")
        p.arrow(240, y + 22, 268, y + 22)
        p.arrow(330, y + 22, 358, y + 22)
        p.box(360, y, 190, 44, kind, f"A{r}, gelu, B{r} on all tokens")
        p.arrow(550, y + 22, 578, y + 22)
        p.arrow(640, y + 22, 668, y + 22)
        p.box(670, y, 120, 44, kind, f"tokens {r}: x + y")
    p.box(270, 34, 60, 108, "none", "gather")
    p.box(580, 34, 60, 108, "none", "scatter")
    p.text(10, 20, "[S/tp, D]", "small")
    p.text(360, 20, "[S, F/tp]", "small")
    p.text(670, 20, "[S/tp, D]", "small")
    p.text(
        10,
        172,
        "forward all-gather, then reduce-scatter; backward the other way round (and a second gather)",
        "small",
    )
    return p


def pipeline() -> Picture:
    """GPipe and 1F1B of 4 stages, 8 micro-batches; backward twice as long as forward."""
    p = Picture("parallel_pp", "Pipeline schedules: GPipe and 1F1B, 4 stages, 8 micro-batches", 860, 300)
    for k, one_f_one_b in enumerate((False, True)):
        top = 34 + 138 * k
        name = "1F1B: at most p micro-batches kept" if one_f_one_b else "GPipe: all m micro-batches kept"
        p.text(10, top - 10, name, "title")
        for stage, actions in enumerate(_timeline(4, 8, one_f_one_b=one_f_one_b)):
            p.text(10, top + 17 + 26 * stage, f"rank {stage}", "small")
            for begin, length, i, is_forward in actions:
                kind = "r0" if is_forward else "r1"
                p.box(60 + 23.6 * begin, top + 26 * stage, 23.6 * length - 1, 22, kind, str(i))
    p.text(
        10,
        290,
        "blue: forward, green: backward (twice as long), gap: bubble = (p-1)/(m+p-1) of the step",
        "small",
    )
    return p


def _timeline(p: int, m: int, *, one_f_one_b: bool) -> list[list[tuple[float, float, int, bool]]]:
    """Each stage's (begin, length, micro-batch, is forward), every action as early as its inputs allow."""
    orders = []
    for stage in range(p):
        warm = min(m, p - stage) if one_f_one_b else m
        order = [(i, True) for i in range(warm)]
        for i in range(m):
            order.append((i, False))
            if warm + i < m:
                order.append((warm + i, True))
        orders.append(order)
    ended: dict[tuple[int, int, bool], float] = {}
    rows: list[list[tuple[float, float, int, bool]]] = [[] for _ in range(p)]
    free, done = [0.0] * p, [0] * p
    while any(done[s] < 2 * m for s in range(p)):
        for stage in range(p):
            while done[stage] < 2 * m:
                i, is_forward = orders[stage][done[stage]]
                before = stage - 1 if is_forward else stage + 1
                needs = (before, i, is_forward) if 0 <= before < p else (stage, i, True)
                if needs not in ended and not (is_forward and stage == 0):
                    break
                begin = max(free[stage], 0.0 if is_forward and stage == 0 else ended[needs])
                length = 1.0 if is_forward else 2.0
                rows[stage].append((begin, length, i, is_forward))
                free[stage] = ended[stage, i, is_forward] = begin + length
                done[stage] += 1
    return rows


def context() -> Picture:
    """Which rank computes which pairs, contiguous and zig-zag; and the ring."""
    p = Picture("parallel_cp", "Context parallelism: pairs of query and key by rank, and the ring", 800, 268)
    for k, (name, owner) in enumerate(
        (("contiguous", (0, 0, 1, 1, 2, 2, 3, 3)), ("zig-zag", (0, 1, 2, 3, 3, 2, 1, 0)))
    ):
        left = 10 + 250 * k
        p.text(left, 20, f"{name}: queries down, keys across", "small")
        for row in range(8):
            for column in range(row + 1):
                p.box(left + 25 * column, 30 + 25 * row, 23, 23, RANKS[owner[row]])
        counts = [sum(row + 0.5 for row in range(8) if owner[row] == r) for r in range(4)]
        p.text(left, 250, "work " + " : ".join(f"{count:g}" for count in counts), "small")
    at = ((540, 40), (680, 40), (680, 170), (540, 170))
    for r, (x, y) in enumerate(at):
        p.box(x, y, 100, 50, RANKS[r], f"rank {r}: Q{r}")
    p.arrow(640, 65, 678, 65)
    p.arrow(730, 90, 730, 168)
    p.arrow(680, 195, 642, 195)
    p.arrow(590, 170, 590, 92)
    p.text(604, 134, "K, V go round", "small")
    return p


def expert() -> Picture:
    """Rows to experts and back."""
    p = Picture("parallel_ep", "Expert parallelism: rows travel to their experts and back", 800, 216)
    for r, kind in enumerate(RANKS[:2]):
        y = 40 + 86 * r
        p.box(10, y, 110, 50, kind, f"tokens of rank {r}")
        p.arrow(120, y + 25, 148, y + 25)
        p.box(150, y, 70, 50, kind, "router")
        for e in range(2):
            p.box(430, y + 27 * e, 120, 23, kind, f"expert {2 * r + e}")
        p.box(690, y, 100, 50, kind, "weighted sum")
        for other in range(2):
            target = 40 + 86 * other + 25
            p.arrow(220, y + 25, 428, target, "" if other == r else "dash")
            p.arrow(550, y + 25, 688, target, "" if other == r else "dash")
    p.text(270, 26, "all-to-all: rows by expert", "small")
    p.text(580, 26, "all-to-all back", "small")
    p.text(
        10,
        206,
        "dashed: crosses ranks; how many rows differs each time, also zero, and every rank takes part",
        "small",
    )
    return p


def mesh() -> Picture:
    """Sixteen ranks as dense axes and as expert axes."""
    p = Picture("parallel_mesh", "16 ranks: dp 2, pp 2, cp 2, tp 2; experts etp 1, ep 4, edp 2", 800, 268)
    for dp in range(2):
        for pp in range(2):
            left, top = 40 + 380 * dp, 46 + 110 * pp
            p.box(left - 8, top - 12, 350, 96, "none")
            p.text(left, top + 2, f"dp {dp}  pp {pp}", "small")
            for cp in range(2):
                for tp in range(2):
                    rank = ((dp * 2 + pp) * 2 + cp) * 2 + tp
                    x = left + 84 * (2 * cp + tp)
                    p.box(x, top + 10, 78, 34, RANKS[2 * cp + tp], f"rank {rank}")
                    p.text(x + 39, top + 58, f"cp {cp} tp {tp}", "small", "middle")
                    p.text(x + 39, top + 74, f"edp {dp} ep {2 * cp + tp}", "small", "middle")
    p.text(
        40,
        22,
        "rank = ((dp pp_size + pp) cp_size + cp) tp_size + tp: tp neighbours adjacent, dp farthest",
        "small",
    )
    p.text(
        40,
        258,
        "one colour: the same experts of its stage (edp copies); a box: one stage of one replica",
        "small",
    )
    return p


if __name__ == "__main__":
    for draw in (data, zero, tensor, sequence, pipeline, context, expert, mesh):
        draw().save(Path(__file__).parent)
