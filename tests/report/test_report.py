"""The HTML page: self-contained, and safe for records with any content."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from analysis.synthetic_records import record, thousands, write, write_grid
from probmask.analysis.records import find_records
from probmask.cli import main
from probmask.report import render_page

NO_RANGE = {"low": 1, "high": 1, "counts": [1]}
NO_BINS = {"low": 0, "high": 1, "counts": []}


class Elements(HTMLParser):
    """The elements of a page, with their attributes and their text."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.found and self.inside:
            self.found[-1][2].append(data)

    def all(self, tag):
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]


def page_of(*paths):
    return render_page(find_records(paths))


def payload_in(page):
    ((_, text),) = [each for each in Elements(page).all("script") if each[0].get("id") == "data"]
    return json.loads(text)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


def test_loads_nothing_and_runs_only_its_own_script(grid):
    elements = Elements(page_of(grid))
    loading = [
        (tag, name, value)
        for tag, attributes, _ in elements.found
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action") or name.startswith("on")
    ]
    assert loading == [("a", "href", "#results")]
    (policy,) = [
        attributes["content"]
        for attributes, _ in elements.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    ((_, script),) = [each for each in elements.all("script") if not each[0]]
    ((_, style),) = elements.all("style")
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_parts_are_in_the_package_and_contain_no_urls():
    parts = files("probmask.report")
    for part in parts.iterdir():
        if part.name.endswith((".js", ".css", ".html")):
            hosts = set(re.findall(r"https?://[^\s\"'<>]+", part.read_text(encoding="utf-8")))
            assert hosts <= {"http://www.w3.org/2000/svg"}, part.name


def test_the_same_records_give_the_same_bytes(grid):
    assert page_of(grid) == page_of(*sorted(grid.iterdir(), reverse=True))


def test_text_of_a_record_is_escaped(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    made = record("gmp", model=evil)
    made["config"].update(model=evil, **{evil: evil})
    made["layers"][0]["name"] = evil
    write(tmp_path / "<script>alert(1)<" / "script>", made)
    write(tmp_path / "other", record())
    page = page_of(tmp_path)
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<!--" not in page
    payload = payload_in(page)
    assert payload["runs"][0][0] == "<script>alert(1)</script>"
    assert evil in payload["config"]["values"]


def test_configurations_can_be_reconstructed(grid):
    page = page_of(grid)
    payload = payload_in(page)
    config = payload["config"]
    for row in payload["runs"]:
        chosen = dict(enumerate(config["base"]))
        variant = config["variants"][row[-1]]
        chosen.update(zip(variant[::2], variant[1::2], strict=True))
        shown = {config["keys"][key]: config["values"][value] for key, value in chosen.items()}
        made = json.loads((grid / row[0] / "record.json").read_text(encoding="utf-8"))
        assert shown["method.name"] == made["method"]["name"]
        assert float(shown["method.sparsity"]) == made["method"]["sparsity"]
        assert shown["optimizer.lr"] == "0.1"
        assert shown["versions.torch"] == "2.13.0"
    assert "/somewhere" not in page


def test_dense_twins_have_distinct_names(tmp_path):
    write(tmp_path / "demo", record())
    write(tmp_path / "demo" / "dense", record("dense", 0.0))
    names = [row[0] for row in payload_in(page_of(tmp_path / "demo"))["runs"]]
    assert sorted(names) == ["demo", "demo/dense"]


def test_size_with_two_thousand_runs():
    page = render_page(thousands())
    payload = payload_in(page)
    assert len(payload["runs"]) == 2000
    assert len(payload["config"]["variants"]) == 100  # seeds do not count
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"history": []},
        {"history": [{}, {"epoch": 1, "loss": None, "histograms": {"a": NO_RANGE, "b": NO_BINS}}]},
        {"layers": []},
        {"hardware": {"cpu": "\u2028 \x00"}},
        {"latency": {"milliseconds": 1.25, "batch": 1}},
    ],
)
def test_incomplete_records_are_shown(tmp_path, changes):
    write(tmp_path / "run", record(**changes))
    payload = payload_in(page_of(tmp_path))
    assert payload["runs"][0][4] == record()["test"]["accuracy"]


def test_curves_are_means_over_seeds_and_end_with_the_last_epoch(tmp_path):
    for seed in (0, 1):
        made = record(seed=seed)
        made["history"] = [{"epoch": epoch, "loss": float(epoch + seed)} for epoch in range(1, 501)]
        write(tmp_path / str(seed), made)
    (cell,) = payload_in(page_of(tmp_path))["settings"][0]["cells"]
    epochs, losses = cell["curves"]["epochs"], cell["curves"]["values"]["loss"]
    assert len(epochs) == 100
    assert (epochs[0], epochs[-1]) == (1, 500)
    assert losses == [epoch + 0.5 for epoch in epochs]


def test_replaces_a_page_but_no_other_file(grid, tmp_path, capsys):
    page = tmp_path / "new" / "report.html"
    for _ in range(2):
        assert main(["report", str(grid), "--out", str(page)]) == 0
        assert capsys.readouterr().out.endswith(f"{page}\n")
    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html><p>years of work")
    assert main(["report", str(grid), "--out", str(mine)]) == 2
    assert "not a page of 'probmask report'" in capsys.readouterr().err
    assert mine.read_text() == "<!doctype html><p>years of work"
    assert main(["report", str(grid), "--out", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "new"), "--out", str(page)]) == 2
    assert "no record.json" in capsys.readouterr().err


def test_json_output(grid, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main(["report", str(grid), "--out", str(page), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"page": str(page), "runs": 26, "bytes": page.stat().st_size}
