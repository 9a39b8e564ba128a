"""The report's style sheet: light, dark and print from one set of variables, which the figures use too."""

_LIGHT = """
--bg:#f6f6f3;--card:#ffffff;--ink:#1d2024;--muted:#676d75;--line:#e2e3df;
--ok:#2e9e6b;--warn:#d9a021;--bad:#cf4a4a;--busy:#5b83c9;
--run0:#3569d1;--run1:#d9712a;--run2:#239a70;--run3:#b3468f;--run4:#7557c4;--run5:#b8951a;--run6:#2693a8;
--run7:#876a57;
--part0:#b9bec6;--part1:#4f7fd0;--part2:#7fb6d9;--part3:#a07bc9;--part4:#e0a458;--part5:#8aa38d;
"""

_DARK = """
--bg:#131518;--card:#1b1e22;--ink:#e7e9ec;--muted:#99a0a9;--line:#2f343a;
--ok:#58c795;--warn:#e8be57;--bad:#ee7f7f;--busy:#83a9ee;
--run0:#7ea8ff;--run1:#f2a05c;--run2:#5bcd9f;--run3:#e585c5;--run4:#ae97f5;--run5:#e2c556;--run6:#62cadd;
--run7:#c0a592;
--part0:#5a616b;--part1:#6f9df0;--part2:#8cc5e8;--part3:#b997e3;--part4:#edb878;--part5:#9dbaa0;
"""

CSS = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 24px 60px}}
h1{{font-size:25px;margin:0 0 4px;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:17px;margin:34px 0 12px;letter-spacing:-.005em}}
h3{{font-size:13.5px;margin:0 0 8px;font-weight:600}}
.sub,.note{{color:var(--muted)}} .note{{font-size:13px;margin:6px 0 0}}
.card{{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;
min-width:0}}
.grid{{display:grid;gap:14px;grid-template-columns:repeat(2,minmax(0,1fr))}}
.wide{{grid-column:1/-1}}
.stats{{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(172px,1fr));margin:18px 0}}
.stat b{{display:block;white-space:nowrap;font-size:20px;font-weight:650;letter-spacing:-.02em;
line-height:1.25;font-variant-numeric:tabular-nums}}
.stat>span{{color:var(--muted);font-size:12.5px}} .stat small{{color:var(--muted);font-size:12.5px;
display:block}}
.verdict{{margin-top:6px}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}}
th{{text-align:right;font-weight:500;color:var(--muted);font-size:12.5px;padding:4px 10px;
vertical-align:bottom}}
td{{text-align:right;padding:7px 10px;border-top:1px solid var(--line);white-space:nowrap}}
th:first-child,td:first-child{{text-align:left}} td.text{{text-align:left;white-space:normal}}
td small{{display:block;color:var(--muted);font-size:12px;font-weight:400}}
tr.section td{{color:var(--muted);font-size:12.5px;font-weight:600;padding-top:14px;border-top:0}}
table.figures td{{padding:4px 10px}} table.figures{{width:auto;min-width:60%}}
tr.best td.best,td.best{{font-weight:700}}
.chip{{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px;vertical-align:-1px}}
.legend{{position:sticky;top:0;z-index:2;background:var(--bg);padding:9px 0;display:flex;flex-wrap:wrap;
gap:4px 20px;font-size:13.5px;
border-bottom:1px solid var(--line)}}
.pill{{display:inline-block;letter-spacing:0;border-radius:99px;padding:1px 9px;font-size:12.5px;
font-weight:600;color:var(--card)}}
.pill.ok{{background:var(--ok)}} .pill.bad{{background:var(--bad)}} .pill.none{{background:var(--muted)}}
.ok-text{{color:var(--ok)}} .bad-text{{color:var(--bad)}}
svg{{display:block;width:100%;height:auto;font-family:inherit}}
.empty{{color:var(--muted);font-size:13px;padding:26px 0;text-align:center}}
pre{{overflow:auto;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:10px 0 0}}
code{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
details{{margin-top:10px}} summary{{cursor:pointer;font-weight:600}}
.verdicts{{margin:0;padding:0;list-style:none}} .verdicts li{{padding:5px 0}}
@media (max-width:820px){{.grid{{grid-template-columns:minmax(0,1fr)}}}}
@media print{{body{{background:#fff;font-size:11.5px}} main{{max-width:none;padding:0}}
.legend{{position:static}}
.card,.stat{{break-inside:avoid;border-color:#ccc}} h2{{break-after:avoid}} .grid{{gap:8px}}}}
"""
