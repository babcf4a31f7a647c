"""How the report looks: the page's CSS, one colour and one explanation for each phase. Draws nothing."""

from ops.goodput import Phase

PHASE_COLOURS = {
    Phase.STEP: "#2f9e5f",
    Phase.LOST_WORK: "#e03e3e",
    Phase.DETECTION: "#f08c1a",
    Phase.RESTART: "#f2c037",
    Phase.SAVE_STALL: "#8b5cf6",
    Phase.EVALUATION: "#14a3b8",
    Phase.SCHEDULING: "#93a8c8",
    Phase.INIT: "#5b84d6",
    Phase.LOAD: "#2f55b0",
    Phase.FINISH: "#6b7a90",
    Phase.IDLE: "#b5bcc8",
    Phase.STOPPED: "#d4d9e1",
}
PHASE_WORDS = {
    Phase.STEP: "steps that counted",
    Phase.LOST_WORK: "steps trained for nothing",
    Phase.DETECTION: "failure until notice",
    Phase.RESTART: "notice until new ranks",
    Phase.SAVE_STALL: "training blocked by a save",
    Phase.EVALUATION: "evaluation",
    Phase.SCHEDULING: "waiting for workers",
    Phase.INIT: "ranks start up",
    Phase.LOAD: "checkpoint is read",
    Phase.FINISH: "after the last step",
    Phase.IDLE: "between attempts, or too few nodes alive",
    Phase.STOPPED: "nobody drove the run",
}
STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1b2330; --quiet: #667085;
  --line: #e4e7ec; --train: #2563eb; --eval: #c2570c; --bad: #d92d20; --good: #15803d; }
@media (prefers-color-scheme: dark) { :root { --bg: #0f141b; --card: #181f29; --ink: #e6eaf0;
  --quiet: #94a1b3; --line: #2a3442; --train: #6ea8fe; --eval: #f5a35c; --bad: #ff6b61; --good: #4ade80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 12px; }
header { display: flex; gap: 14px; align-items: center; flex-wrap: wrap; margin-bottom: 4px; }
.status { font-weight: 650; font-size: 13px; padding: 3px 11px; border-radius: 99px; color: #fff;
  background: #64748b; }
.FINISHED { background: #15803d; } .FAILED { background: #c8261b; } .RUNNING { background: #2563eb; }
.quiet { color: var(--quiet); } .note { border-left: 4px solid var(--bad); padding: 8px 14px; margin: 14px 0;
  background: var(--card); border-radius: 6px; overflow-wrap: anywhere; white-space: pre-wrap; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 20px 0; }
@media (max-width: 800px) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 12px 16px; } .tile b { display: block; font-size: 22px; font-weight: 650; }
.tile span { color: var(--quiet); font-size: 13px; }
section { padding: 18px 20px; margin: 16px 0; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--quiet); font-size: 13px; } svg text.axis { fill: var(--ink); }
.grid { stroke: var(--line); } .train, .eval { fill: none; stroke-width: 2; stroke-linejoin: round; }
.train { stroke: var(--train); } .eval { stroke: var(--eval); stroke-dasharray: 5 4; }
.eval-dot { fill: var(--eval); } .mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3; }
.lost { fill: var(--bad); opacity: .16; } .badge { fill: var(--bad); }
svg text.badge-text { fill: #fff; font-size: 12px; font-weight: 700; }
.bracket { fill: none; stroke: var(--quiet); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--quiet); font-size: 13px; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; } .joined td { border-bottom: 0; padding-bottom: 0; }
tr:last-child td { border-bottom: 0; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px; }
.keys { display: flex; gap: 20px; flex-wrap: wrap; font-size: 13px; color: var(--quiet); margin-bottom: 6px; }
.key { display: inline-block; width: 22px; height: 0; border-top: 3px solid; margin-right: 7px;
  vertical-align: 4px; }
.bars { width: 40%; } .bar { height: 9px; border-radius: 5px; min-width: 1px; margin-top: 7px; }
pre { margin: 0; overflow-x: auto; font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details > summary { cursor: pointer; color: var(--quiet); }
details[open] > summary { margin-bottom: 8px; }
.evidence { max-height: 240px; overflow: auto; }
"""
