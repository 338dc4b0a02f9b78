"""Style sheet and scripts of the report pages: small screens first, dark by preference, print; nothing is loaded."""

WORD_STYLE = """
dfn { font-style: inherit; cursor: help; text-decoration: underline dotted; text-underline-offset: 0.2em; }
dfn:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
.tip { position: fixed; z-index: 2; left: 0; right: 0; bottom: 0; padding: 0.75rem 1rem; visibility: hidden;
  background: var(--text); color: var(--ground); font: 400 0.9375rem/1.4 system-ui, sans-serif; text-align: left;
  white-space: normal; overflow-wrap: break-word; cursor: auto; transition: visibility 0s 0.3s; }
dfn:hover > .tip, dfn:focus > .tip { visibility: visible; z-index: 3; transition-delay: 0s; }
.untipped .tip { visibility: hidden !important; transition-delay: 0s !important; }
@media (min-width: 70rem) {
  p > dfn, .opening li > dfn { position: relative; }
  p > dfn > .tip, .opening li > dfn > .tip { position: absolute; left: 0; right: auto; bottom: auto; top: 100%;
    width: 20rem; border-radius: 0.4rem; }
}
.terms dt { font-weight: 600; margin-top: 0.75rem; }
.terms dd { margin: 0; max-width: 46rem; }
"""
"""Of marked words, their tips and their list (`fedecider.report.glossary`)."""

STYLE = (
    WORD_STYLE
    + """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5a6270; --ground: #fff; --card: #f6f7f9; --line: #d5d9e0;
  --link: #0b5cad; --warn: #fff4e0; --edge: #c96f00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #a3abb8; --ground: #15181c; --card: #1e2227; --line: #3a4049; --link: #7db8f2;
    --warn: #33270f; --edge: #e59a2f; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; color: var(--text); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem;
  border-top: 1px solid var(--line); }
p, li { max-width: 46rem; }
a { color: var(--link); }
.subtitle { color: var(--soft); margin: 0.25rem 0 1rem; }
.opening { font-size: 1.0625rem; margin: 1rem 0; }
.opening h2 { margin: 0; padding: 0; border: 0; font-size: 1rem; color: var(--soft); }
.opening h3 { margin: 1rem 0 0.25rem; font-size: 1rem; }
.opening p { margin: 0 0 0.75rem; }
.opening .answer { font-size: 1.3rem; line-height: 1.35; font-weight: 600; margin: 0.25rem 0 0.75rem; }
.opening ul { margin: 0; padding-left: 1.25rem; font-size: 1rem; }
.downloads a { display: inline-block; margin: 0 0.75rem 0.5rem 0; padding: 0.25rem 0.75rem; font-size: 0.875rem;
  border: 1px solid var(--link); border-radius: 0.4rem; text-decoration: none; }
.skip { position: absolute; left: -999rem; }
.skip:focus { position: static; }
.contents { background: var(--card); border-radius: 0.5rem; padding: 0.75rem 1rem; margin: 1rem 0; }
.contents h2, .warnings h2 { margin: 0; padding: 0; border: 0; font-size: 1rem; }
.contents ol { margin: 0.25rem 0 0; padding-left: 1.5rem; columns: 16rem; }
.warnings { background: var(--warn); border-left: 0.3rem solid var(--edge); padding: 0.75rem 1rem; margin: 1rem 0; }
.warnings li { max-width: none; }
.warnings ul { margin: 0.25rem 0 0; padding-left: 1.25rem; }
.table { overflow-x: auto; margin: 1rem 0; }
.table:focus-visible, .plot:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.875rem; min-width: min(100%, 20rem); }
caption { text-align: left; color: var(--soft); padding: 0.25rem 0; }
caption span { position: sticky; left: 0; display: block; max-width: min(100%, 100vw - 2rem); }
th, td { padding: 0.3rem 0.75rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: normal; max-width: 30rem; }
thead th { border-bottom-width: 2px; white-space: nowrap; }
tbody th { font-weight: 600; }
tbody th.long { overflow-wrap: anywhere; min-width: 6.5rem; }
td.long { overflow-wrap: anywhere; min-width: 11rem; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums;
  padding-left: 0.75rem; }
@media (max-width: 40rem) { .interval { display: block; color: var(--soft); font-size: 0.75rem; } }
figure { margin: 1rem 0; padding: 0.75rem; background: #fff; color: #1c2024; border: 1px solid var(--line);
  border-radius: 0.5rem; }
figcaption { font-weight: 600; font-size: 0.9375rem; margin-bottom: 0.25rem; }
.plot { overflow-x: auto; }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.875rem; border-top: 1px solid var(--line); }
@media print {
  :root { color-scheme: light; --text: #000; --soft: #333; --ground: #fff; --card: #fff; --line: #999; --link: #000;
    --warn: #fff; --edge: #000; }
  @page { margin: 15mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .skip, .tip, .downloads { display: none; }
  dfn { text-decoration: none; }
  .table, .plot { overflow: visible; }
  .plot > div { min-width: 0 !important; }
  .contents, .warnings { border: 1px solid #999; }
  table { font-size: 8.5pt; max-width: 100%; }
  th, td, td.number, thead th { white-space: normal; overflow-wrap: anywhere; }
  .interval { display: block; }
  thead { display: table-header-group; }
  tr, figure, figcaption { break-inside: avoid; }
  h2, caption { break-after: avoid; }
}
"""
)

PRINT_WIDTH = 660
"""Pixels between the margins of a printed page, A4 or Letter; drawings do not shrink by themselves."""

TERM_SCRIPT = """
(function () {
  var root = document.documentElement;
  function again() { root.classList.remove("untipped"); }
  document.addEventListener("keydown", function (event) {
    if (event.key === "Escape") { root.classList.add("untipped"); }
  });
  document.addEventListener("focusin", again);
  document.addEventListener("pointerover", again);
})();
"""
"""Escape puts the explanation of a word away; all else about them works without a script."""

PRINT_SCRIPT = f"""
(function () {{
  function all(change) {{
    document.querySelectorAll(".js-plotly-plot").forEach(function (plot) {{ Plotly.relayout(plot, change); }});
  }}
  window.addEventListener("beforeprint", function () {{ all({{autosize: false, width: {PRINT_WIDTH}}}); }});
  window.addEventListener("afterprint", function () {{ all({{autosize: true, width: null}}); }});
}})();
"""
