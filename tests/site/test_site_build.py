"""Building the site: formulas, execution and its cache, processing, configuration, checks, README."""
import html
import json
import re
import shutil
import stat
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from iclr26.lab import site
from iclr26.lab.papers import SHARED_FOLDERS, THEMES, list_papers
from iclr26.lab.site import SiteError, check_site, formulas, typeset

CONFIG = {
    "project": {"type": "website", "output-dir": "_site", "render": ["nbs/**/*.ipynb"]},
    "website": {"title": "mini", "search": True, "navbar": {"left": [{"text": "Home", "href": "nbs/index.ipynb"}, {"text": "Gone", "href": "nbs/gone.ipynb"}]},
                "sidebar": {"contents": [{"text": "Home", "href": "nbs/index.ipynb"}, {"section": "Science", "contents": [{"auto": "nbs/demo"}, {"auto": "nbs/missing"}]},
                                         {"section": "Empty", "contents": [{"auto": "nbs/not_there_yet"}]}]}},
    "format": {"html": {"theme": {"light": "default", "dark": "darkly"}, "toc": True}},
}
INDEX = """# Demo
> A paper about halving, $x/2$

- paper: "Halving numbers"
- authors: A. Nobody
- venue: ICLR 2026
- arxiv: "2600.00001"
- theme: science"""


def notebook(path: Path, *cells: str) -> Path:
    """Cells that start with `#|` or hold no Markdown mark are code."""
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}})
    for source in cells:
        markdown = source.startswith(("# ", "md:"))
        nb.cells.append(nbformat.v4.new_markdown_cell(source.removeprefix("md:")) if markdown else nbformat.v4.new_code_cell(source))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


@pytest.fixture
def checkout(tmp_path) -> Path:
    top = tmp_path / "checkout"
    (top / "data" / "results").mkdir(parents=True)
    notebook(top / "nbs" / "index.ipynb", "# Home\n> Where one starts", "md:See [the demo](demo/index.ipynb) and [its theory](demo/theory.ipynb#bounds).",
             "#| echo: false\nfrom IPython.display import Markdown\nMarkdown('| a | b |\\n|---|---|\\n| 1 | [x](demo/index.ipynb) |')")
    notebook(top / "nbs" / "demo" / "index.ipynb", INDEX, "print(6 * 7)")
    notebook(top / "nbs" / "demo" / "theory.ipynb", "# Theory\n> One bound", "md:## Bounds\n\nBy \\eqref{eq:later} $H$ is bounded.".replace("\\eqref{eq:later}", "$\\eqref{eq:later}$"),
             "md:$$H \\le 1 \\label{eq:later}$$", "from IPython.display import HTML\nHTML('<a href=\"demo/index.html\">from the top</a>')")
    (top / "_quarto.yml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return top


# ---------------------------------------------------------------- maths

@pytest.mark.parametrize("text, expected", [
    ("a $x$ b", ["x"]), ("$x$-stable and ($y$)", ["x", "y"]), ("code `$x$` and ``a ` $y$``", []), ("```\n$x$\n```\n$y$", ["y"]), ("~~~ python\n$x$\n~~~", []),
    (r"\$5 and \$6", []), ("$5 and $6", []), ("costs 5$ or 6$", []), ("$ x$ no", []), ("$a\nb$", ["a\nb"]), ("$a\n\nb$", []), ("<!-- $x$ -->", []),
    ("$$x$$", ["x"]), ("$$\nx\n+ y\n$$", ["x\n+ y"]), ("> $$\n> x\n> $$", ["x"]), (r"$\$5$", [r"\$5"]), ("| $a$ | $|b|$ |", ["a", "|b|"]), (r"\\$x$", ["x"]),
])
def test_formulas_are_found_and_nothing_else(text, expected):
    assert [tex for tex, _ in formulas(text)] == expected


def test_numbered_formula_gets_an_environment():
    assert formulas(r"$$x \tag{1}$$") == [(r"\begin{equation}x \tag{1}\end{equation}", True)]
    for env in ("equation", "align", "align*", "gather", "multline"):
        assert formulas(rf"$$\begin{{{env}}}x \tag{{1}}\end{{{env}}}$$") == [(rf"\begin{{{env}}}x \tag{{1}}\end{{{env}}}", True)]
    for env in ("aligned", "gathered", "cases"):
        inner = rf"\begin{{{env}}}x\end{{{env}}} \tag{{1}}"
        assert formulas(f"$${inner}$$") == [(rf"\begin{{equation}}{inner}\end{{equation}}", True)]
        assert "<math" in typeset([f"$${inner}$$"], ["here"])[0]


def test_reference_reaches_a_later_cell():
    first, second = typeset([r"by $\eqref{eq:b}$", r"$$x \label{eq:b} \tag{7}$$"], ["one", "two"])
    assert '<a href="#eq:b">' in first and 'id="eq:b"' in second and "7" in html.unescape(first)


@pytest.mark.parametrize("tex", [r"a*b*c", r"|x|_1", r"\{x\}", r"x_i^*", r"[a](b)", r"a < b", r"f'(x)", r"\texttt{a}\_b", r"x--y...z", r"\sim \sqrt{x}", r"a \mid b"])
@pytest.mark.parametrize("frame", ["{}", "**{}** and *x*", "- item {}", "| a | b |\n|---|---|\n| {} | y |", "## Head {}", "> quote {}"])
def test_markdown_leaves_mathml_alone(tex, frame):
    from math_core import LatexToMathML
    from smalldocs.markdown import render
    wanted = LatexToMathML().convert_all([(tex, False)])[0]
    page = render(typeset([frame.format(f"${tex}$")], ["x"])[0], {"title": "t"})
    shown = re.search(r"<math>.*?</math>", page, re.S)[0]
    text = lambda mathml: [html.unescape(part) for part in re.split(r"(<[^>]*>)", mathml)]
    assert text(shown) == text(wanted)


def test_bad_formula_names_place_and_formula():
    with pytest.raises(SiteError) as caught: typeset(["fine $x$", r"bad $\nonsense x$ and $\frac{a$"], ["nb.ipynb, cell 1", "nb.ipynb, cell 4"])
    assert len(caught.value.faults) == 2 and all(f.startswith("nb.ipynb, cell 4: formula") for f in caught.value.faults)
    assert r"\\nonsense x" in caught.value.faults[0] and "Unknown command" in caught.value.faults[0]


# ---------------------------------------------------------------- execution

def test_failing_cell_is_named_and_the_partial_notebook_stays(checkout):
    bad = notebook(checkout / "nbs" / "demo" / "theory.ipynb", "# Theory\n> Fails", "x = 1\nprint(x)", "#| exports\ny = x / 0  # boom", "print('never')")
    with pytest.raises(SiteError) as caught: site.execute(bad, checkout)
    message = str(caught.value)
    assert message.startswith("nbs/demo/theory.ipynb, cell 2 ('y = x / 0  # boom'): ZeroDivisionError: division by zero; partial notebook: ")
    partial = nbformat.read(message.rpartition(": ")[2], as_version=4)
    assert partial.cells[1].outputs[0].text == "1\n" and partial.cells[2].outputs[0].ename == "ZeroDivisionError" and not partial.cells[3].outputs


def test_dead_kernel_is_named(checkout):
    bad = notebook(checkout / "nbs" / "index.ipynb", "# Home\n> Dies", "import os\nos._exit(3)")
    with pytest.raises(SiteError, match=r"nbs/index.ipynb, cell 1 \('import os'\): DeadKernelError"): site.execute(bad, checkout)


def test_executed_notebook_is_kept_until_something_changes(checkout, monkeypatch):
    theory, index = checkout / "nbs" / "demo" / "theory.ipynb", checkout / "nbs" / "demo" / "index.ipynb"
    first = site.execute(index, checkout)
    assert nbformat.read(first, as_version=4).cells[1].outputs[0].text == "42\n"
    import nbclient
    with monkeypatch.context() as patch:
        def no_kernel(*args, **kwargs): raise AssertionError("executed again")
        patch.setattr(nbclient, "NotebookClient", no_kernel)
        assert site.execute(index, checkout) == first
        with pytest.raises(AssertionError, match="executed again"): site.execute(index, checkout, force=True)
    key, other = site.content_key(index, checkout), site.content_key(theory, checkout)
    (checkout / "data" / "results" / "demo.json").write_text("{}")
    assert site.content_key(index, checkout) != key and site.content_key(theory, checkout) != other
    second = site.execute(index, checkout)
    assert second != first and not first.exists() and second.exists()


def test_key_depends_on_the_floors_below_only(root):
    names = lambda notebook: {p.relative_to(root).parts[:2] for p in site.depends_on(root / notebook, root) if p.is_relative_to(root / "iclr26")}
    assert names("nbs/lab/claims.ipynb") == {("iclr26", "lab")}
    paper = list_papers()[0].name
    assert names(f"nbs/{paper}/index.ipynb") == {("iclr26", "lab"), ("iclr26", "blocks"), ("iclr26", paper)}
    assert {("iclr26", p.name) for p in list_papers()} <= names("nbs/index.ipynb")


def test_eval_false_is_shown_but_not_executed(checkout):
    path = notebook(checkout / "nbs" / "index.ipynb", "# Home\n> x", "#| eval: false\nraise SystemExit", "print('after')")
    cells = nbformat.read(site.execute(path, checkout), as_version=4).cells
    assert not cells[1].outputs and cells[2].outputs[0].text == "after\n"


# ---------------------------------------------------------------- nbdev

def test_directives(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "# T\n> d", "#| default_exp x", "#| hide\nsecret = 1", "#| exports\ndef shown(): pass", "#| export\nimport os",
                    "#| export\ndef plumbing(): pass\nclass Pipe: pass", "#| echo: false\nprint(1)", "a = 1\nb = 2 #| hide_line")
    sources = [c["source"] for c in site.process(path)["cells"]]
    assert "secret" not in "".join(sources) and "default_exp" not in "".join(sources) and "import os" not in "".join(sources)
    assert sources[1] == "#| label: src-3\ndef shown(): pass"
    assert sources[2].startswith('#| label: src-5\n#| code-fold: true\n#| code-summary: "Source of plumbing, Pipe"\ndef plumbing')
    assert sources[3].startswith("#| echo: false") and sources[4].strip() == "a = 1"


def test_link_names():
    symbols = {("demo", "halve_all"): "api/demo/core.qmd#halve_all", ("lab", "Claim"): "api/lab/claims.qmd#Claim", ("lab", "Claim.judge"): "api/lab/claims.qmd#Claim.judge",
               ("blocks", "halve_all"): "api/blocks/b.qmd#halve_all", ("demo", "run"): "api/demo/core.qmd#run"}
    link = lambda text: site.link_names(text, "demo", symbols, Path("demo/theory.ipynb"))
    assert link("`halve_all`") == "[`halve_all`](../api/demo/core.qmd#halve_all)"
    assert link("`run()` but not `run`") == "[`run()`](../api/demo/core.qmd#run) but not `run`"
    assert link("`iclr26.blocks.halve_all` `Claim.judge`") == "[`iclr26.blocks.halve_all`](../api/blocks/b.qmd#halve_all) [`Claim.judge`](../api/lab/claims.qmd#Claim.judge)"
    for same in ("# `Claim`", "[`Claim`](x)", "```\n`Claim`\n```", "``Claim``", "`Claims`", "    `Claim`"): assert link(same) == same


# ---------------------------------------------------------------- configuration

def test_configuration_is_resolved(checkout):
    config = site.read_config(checkout)
    pages = site.sidebar_pages(config, checkout)
    assert [p.relative_to(checkout / "nbs").as_posix() for p in pages] == ["index.ipynb", "demo/index.ipynb", "demo/theory.ipynb"]
    found = site.resolve(config, pages, checkout, [])
    assert found["website"]["sidebar"]["contents"] == [{"text": "Home", "href": "index.ipynb"},
        {"section": "Science", "contents": [{"section": "Demo", "href": "demo/index.ipynb", "contents": ["demo/theory.ipynb"]}]}]
    assert found["website"]["navbar"]["left"] == [{"text": "Home", "href": "index.ipynb"}] and found["project"]["render"] == ["**/*.ipynb"]


def test_rooms_come_in_reading_order(checkout):
    for name, imports in (("zeta", ""), ("alpha", "from iclr26.demo.zeta import f"), ("mid", "")):
        notebook(checkout / "nbs" / "demo" / f"{name}.ipynb", f"# {name}\n> x", f"#| export\n{imports}\nx = 1", "from iclr26.demo.alpha import example")
    for name in ("reproduction", "benchmarks"): notebook(checkout / "nbs" / "demo" / f"{name}.ipynb", f"# {name}\n> x")
    assert [p.stem for p in site.reading_order(checkout / "nbs" / "demo")] == ["index", "theory", "mid", "zeta", "alpha", "reproduction", "benchmarks"]


@pytest.mark.parametrize("text, error", [("a: [", "_quarto.yml"), ("website: {}", "sidebar"), ("", "sidebar")])
def test_bad_configuration(tmp_path, text, error):
    (tmp_path / "_quarto.yml").write_text(text)
    with pytest.raises(ValueError, match=error): site.read_config(tmp_path)


def test_no_configuration(tmp_path):
    with pytest.raises(FileNotFoundError, match="_quarto.yml"): site.build(tmp_path / "out", checkout=tmp_path)


def test_every_notebook_of_the_repository_is_listed_once_and_under_its_theme(root):
    config = site.read_config(root)
    listed = site.sidebar_pages(config, root)
    assert {p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts} == set(listed)
    sections = {e["section"].lower(): e["contents"] for e in config["website"]["sidebar"]["contents"] if "section" in e}
    assert set(THEMES) <= set(sections)
    for paper in list_papers(): assert {"auto": f"nbs/{paper.name}"} in sections[paper.theme], f"{paper.name}: add `- auto: nbs/{paper.name}` to {paper.theme!r} in _quarto.yml"
    entries = [e["auto"] for theme in THEMES for e in sections[theme]]
    assert len(entries) == len(set(entries))


# ---------------------------------------------------------------- building

def test_build_from_end_to_end(checkout, tmp_path):
    lines = []
    notebook(checkout / "nbs" / "extra.ipynb", "# Extra\n> Not in the sidebar")
    out = site.build(tmp_path / "out", checkout=checkout, progress=lines.append)
    assert check_site(out) == []
    assert "not listed in _quarto.yml, left out: nbs/extra.ipynb" in lines and not (out / "extra.html").exists()
    theory, index = (out / "demo" / "theory.html").read_text(), (out / "demo" / "index.html").read_text()
    assert "<math" in theory and "$" not in re.sub(r"(?s)<(script|style)\b.*?</\1>", "", theory) and 'href="#eq:later"' in theory
    assert "Halving numbers" in index and "https://arxiv.org/abs/2600.00001" in index and re.search(r"<code><span[^>]*>42</span></code>", index)
    assert '<a href="../demo/index.html">from the top</a>' in theory
    assert "not_there_yet" not in index and "Empty" not in index
    search = json.loads((out / "search.json").read_text())
    assert {e["title"] for e in search} >= {"Home", "Theory"} and json.loads((out / "search.js").read_text().removeprefix("window.searchIndex = ").rstrip().rstrip(";")) == search
    assert not re.search(r"@import", "".join(p.read_text() for p in (out / "site_libs" / "themes").glob("*.css")))


TOKENS = st.lists(st.tuples(st.sampled_from(["", "kw", "st"]), st.text("ab &lt;\n\t", max_size=8)), max_size=6)

@given(TOKENS)
def test_hanging_lines_keep_the_text_and_close_what_they_open(tokens):
    text = lambda html: re.sub("<[^>]*>", "", html)
    block = "".join(f'<span class="{cls}">{t}</span>' if cls else t for cls, t in tokens)
    page = f'<p>a  b</p><pre><code class="sourceCode python">{block}</code></pre>'
    hung = site.hang_lines(page)
    assert text(hung) == text(page)
    for line in hung.split('python">')[1].split("</code>")[0].split("\n"): assert line.count("<span") == line.count("</span>")
    assert len(re.findall('class="line"', hung)) == sum(bool(line.strip()) for line in text(block).split("\n"))


@pytest.mark.parametrize("output, wrapped", [("a long sentence", 1), ("two\nsentences,  one with a gap", 2), ("name  n\nalpha 12  b\nbeta  3", 0)])
def test_output_wraps_unless_it_is_a_table(output, wrapped):
    assert site.hang_lines(f"<pre><code>{output}</code></pre>").count('class="line"') == wrapped


def test_failed_build_lists_all_faults_and_leaves_the_old_site(checkout, tmp_path):
    out = site.build(tmp_path / "out", checkout=checkout, progress=lambda line: None)
    before = {p: p.read_bytes() for p in out.rglob("*.html")}
    notebook(checkout / "nbs" / "demo" / "theory.ipynb", "# Theory\n> Fails", "1 / 0")
    notebook(checkout / "nbs" / "index.ipynb", "# Home\n> Fails too", "undefined_name")
    with pytest.raises(SiteError) as caught: site.build(out, checkout=checkout, progress=lambda line: None)
    assert sorted(f.split(",")[0] for f in caught.value.faults) == ["nbs/demo/theory.ipynb", "nbs/index.ipynb"]
    notebook(checkout / "nbs" / "index.ipynb", "# Home\n> Fine")
    notebook(checkout / "nbs" / "demo" / "theory.ipynb", "# Theory\n> Bad maths", "md:fine", r"md:Here $\undefined$")
    with pytest.raises(SiteError, match=r"nbs/demo/theory.ipynb, cell \d+, near .*formula '\\\\undefined'"): site.build(out, checkout=checkout, progress=lambda line: None)
    assert {p: p.read_bytes() for p in out.rglob("*.html")} == before
    assert [p.name for p in out.parent.iterdir() if p.name.startswith(".out")] == []


def test_build_does_not_touch_a_folder_that_is_no_site(checkout, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    for out in (mine, checkout, checkout.parent):
        with pytest.raises(ValueError, match="out="): site.build(out, checkout=checkout)
    assert (mine / "thesis.tex").read_text() == "x"


def test_broken_link_between_notebooks_is_reported(checkout, tmp_path):
    notebook(checkout / "nbs" / "index.ipynb", "# Home\n> x", "md:[gone](demo/no_such.ipynb) and [anchor](demo/theory.ipynb#nowhere)")
    with pytest.raises(SiteError) as caught: site.build(tmp_path / "out", checkout=checkout, progress=lambda line: None)
    assert sorted(caught.value.faults) == ["index.html: link demo/no_such.html leads nowhere", "index.html: link demo/theory.html#nowhere: no anchor #nowhere there"]


def test_quarto_is_used_when_it_is_there(checkout, tmp_path, monkeypatch):
    """A stand-in records how it is called."""
    fake = tmp_path / "bin" / "quarto"
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}\nimport sys, pathlib, shutil\nargs = sys.argv[1:]\nout = pathlib.Path(args[args.index('--output-dir') + 1])\nout.mkdir(parents=True)\n"
                    "(out / 'index.html').write_text('<p>' + ' '.join(args[:2]) + '</p>')\nshutil.copy(pathlib.Path(args[1]) / '_quarto.yml', out)\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{fake.parent}:{sys.exec_prefix}/bin:/usr/bin:/bin")
    out = site.build(tmp_path / "out", checkout=checkout, progress=lambda line: None)
    assert (out / "index.html").read_text() == f"<p>render {checkout / '_build' / 'site_src'}</p>"
    assert yaml.safe_load((out / "_quarto.yml").read_text())["project"]["type"] == "website"
    fake.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no pandoc')\n")
    with pytest.raises(SiteError, match="quarto render failed: no pandoc"): site.build(out, checkout=checkout, progress=lambda line: None)


def test_reproduction_comes_from_a_run(library):
    """The command line builds a site around a run that it makes itself, and takes the finished one next time."""
    (library.folder / "_quarto.yml").write_text(yaml.safe_dump(CONFIG))
    notebook(library.folder / "nbs" / "index.ipynb", "# Home\n> x", "#| echo: false\nfrom iclr26.lab.ledger import scoreboard\nscoreboard()")
    library.cli("site", check=0)
    page = (library.folder / "_site" / "demo" / "reproduction.html").read_text()
    assert "profile <strong>smoke</strong>, seed 0" in page and 'class="verdict verdict-refuted">refuted</span>' in page and "It takes time." in page
    assert "iclr26 reproduce demo --profile smoke --seeds 0" in page
    assert library.log == ["first 0"] and str(library.folder) not in page
    library.cli("site", check=0)
    assert library.log == ["first 0"]
    assert "demo/index.html" in (library.folder / "_site" / "index.html").read_text()


# ---------------------------------------------------------------- API reference

def test_api_pages_have_an_anchor_for_every_symbol(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "_module_names", lambda package: ["iclr26.lab", "iclr26.lab.claims", "iclr26.lab.paths"])
    sidebar, symbols = site.api_pages(tmp_path / "api")
    assert [e["text"] for e in sidebar[0]["contents"]] == ["claims", "paths"] and ("lab", "Claim.judge") in symbols
    for target in symbols.values():
        page, _, anchor = target.partition("#")
        assert f"{{#{anchor}}}" in (tmp_path / page).read_text()
    claims = (tmp_path / "api" / "lab" / "claims.qmd").read_text()
    assert "smallest accepted value" in claims and yaml.safe_load(claims.split("---")[1])["title"] == "iclr26.lab.claims"


def test_every_module_of_the_package_is_documented():
    names = site._module_names("iclr26")
    assert {"iclr26.lab", "iclr26.lab.site", "iclr26.blocks"} <= set(names) and not [n for n in names if "_modidx" in n or "share" in n]
    order = [n.split(".")[1] for n in names]
    assert order == sorted(order, key=lambda g: (site.FLOORS.index(g) if g in site.FLOORS else 2, g))


def test_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "_module_names", lambda package: ["iclr26.lab.claims", "iclr26.nowhere.at_all"])
    with pytest.raises(SiteError, match="iclr26.nowhere.at_all: cannot be imported: ModuleNotFoundError"): site.api_pages(tmp_path / "api")


# ---------------------------------------------------------------- checks

GOOD = """<html><head><link rel="stylesheet" href="s.css"><script src="s.js"></script></head><body><h2 id="top">T</h2>
<a href="#top">a</a><a href="sub/">b</a><a href="sub/index.html#there">c</a><a href="https://example.org">elsewhere</a><a href="mailto:a@b">m</a>
<img src="data:image/png;base64,xx" alt="a picture"><pre>$x$ \\frac</pre><code>$HOME and $PATH$</code><p>It costs $5 or $6.</p><math><mi>x</mi></math></body></html>"""


@pytest.fixture
def good(tmp_path) -> Path:
    folder = tmp_path / "site"
    (folder / "sub").mkdir(parents=True)
    (folder / "index.html").write_text(GOOD)
    (folder / "sub" / "index.html").write_text('<p id="there">x</p><a href="../index.html#top">up</a>')
    (folder / "s.css").write_text("body { background: url(data:image/png;base64,xx) }")
    (folder / "s.js").write_text("")
    assert check_site(folder) == []
    return folder


@pytest.mark.parametrize("planted, fault", [
    ('<a href="gone.html">x</a>', "link gone.html leads nowhere"), ('<a href="#gone">x</a>', "no anchor #gone"), ('<a href="sub/#gone">x</a>', "no anchor #gone"),
    ('<a href="../../etc/passwd">x</a>', "leads nowhere"), ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn.example.org/x.js from elsewhere"),
    ('<script src="//cdn.example.org/x.js"></script>', "from elsewhere"), ('<link rel="stylesheet" href="http://example.org/x.css">', "from elsewhere"),
    ('<img src="http://example.org/x.png" alt="x">', "from elsewhere"), ('<img src="gone.png" alt="x">', "resource gone.png leads nowhere"), ('<img src="s.js">', "without alt text"),
    ('<img src="s.js" alt=" ">', "without alt text"), ("<p>so $x^2$ is</p>", "left-over TeX"), ("<p>$$x$$</p>", "left-over TeX"), (r"<p>\(x\)</p>", "left-over TeX"),
    (r"<p>\begin{align}</p>", "left-over TeX"), (r"<li>about \alpha</li>", "left-over TeX"), ('<div class="cell-output cell-output-error">E</div>', "failed cell"),
    ('<iframe src="https://example.org"></iframe>', "from elsewhere"), ('<p id="top">again</p>', "id top stands twice"),
])
def test_planted_fault_is_found(good, planted, fault):
    page = good / "index.html"
    page.write_text(GOOD.replace("</body>", planted + "</body>"))
    found = check_site(good)
    assert len(found) == 1 and found[0].startswith("index.html: ") and fault in found[0]


@pytest.mark.parametrize("css", ["@import url(https://fonts.example.org/css2?family=A:wght@0,400;0,700&display=swap);p{color:red}", '@import "//example.org/a.css";p{color:red}',
                                 "@import url('http://example.org/a.css') screen;p{color:red}"])
def test_style_sheet_from_elsewhere_is_found_and_sealed(good, css):
    (good / "s.css").write_text(css)
    assert len(check_site(good)) == 1 and check_site(good)[0].startswith("s.css: loads ")
    site.seal(good)
    assert check_site(good) == [] and (good / "s.css").read_text() == "p{color:red}"


def test_folder_without_pages(tmp_path):
    assert check_site(tmp_path) == [f"{tmp_path}: no pages"]


# ---------------------------------------------------------------- README

def test_readme_is_made_from_the_home_page_and_watched(checkout):
    path = site.readme(checkout)
    text = path.read_text()
    assert "[the demo](nbs/demo/index.ipynb)" in text and "[its theory](nbs/demo/theory.ipynb#bounds)" in text and "| 1 | [x](nbs/demo/index.ipynb) |" in text
    assert "Markdown(" not in text and "<div" not in text and site.readme_faults(checkout) == []
    path.write_text(text.replace("See [the demo]", "Look at [the demo]"))
    assert site.readme_faults(checkout) == ["README.md lacks 'See [the demo](nbs/demo/index.ipynb) and [its theory](nbs/demo/theory.ipynb#boun'"]
    path.unlink()
    assert site.readme_faults(checkout) == ["README.md does not exist"]


def test_readme_of_the_repository_is_in_step(root):
    assert site.readme_faults(root) == []
    first = (root / "README.md").read_text().split("```")[1]
    assert "make reproduce" in first and "make test" in first


def test_guide_has_its_pages(root):
    pages = {p.stem for p in (root / "nbs" / "guide").glob("*.ipynb")}
    assert {"reading", "reproducing", "scaling", "adding_a_paper", "verdicts", "benchmarks"} <= pages and "guide" in SHARED_FOLDERS
