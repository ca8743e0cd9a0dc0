"""The page of `probmask report` in Chromium: plots, sorting, filters and saving."""

import re
import time
from xml.etree import ElementTree

import pytest

pytest.importorskip("selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from analysis.synthetic_records import record, thousands, write, write_grid
from probmask.analysis.comparison import compare, rounded
from probmask.analysis.records import Run, find_records
from probmask.report import write_page
from report.browser import chromium, complaints, contrast, missing, prefer, resize

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(120),
]

PLOTS = ("by-sparsity", "by-macs", "layers", "curves", "histogram", "size", "speed")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(tmp_path_factory, downloads):
    with chromium(tmp_path_factory.mktemp("profile"), downloads) as driver:
        yield driver


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that opens the page of runs; the console must stay empty."""

    def open_page(*runs):
        page = tmp_path / "report.html"
        write_page(runs if isinstance(runs[0], Run) else find_records(runs), page)
        browser.get(page.as_uri())
        return browser

    resize(browser, 1280)
    prefer(browser, "light")
    yield open_page
    assert complaints(browser) == []


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)",
        selector,
    )


def column(browser, table, number):
    return texts(browser, f"#{table} tbody tr td:nth-child({number})")


def click(browser, selector):
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def coordinates(browser):
    """Return all coordinates in the plots, by plot."""
    return browser.execute_script(
        """const found = {};
        for (const svg of document.querySelectorAll(".plot svg")) {
          const texts = [];
          for (const node of svg.querySelectorAll("*"))
            for (const { name, value } of node.attributes)
              if (["x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "d", "width", "height",
                   "transform"].includes(name)) texts.push(value);
          const id = svg.closest("figure").id;
          found[id] = [...(found[id] || []), ...texts];
        }
        return found;"""
    )


def assert_every_plot_is_drawn(browser):
    drawn = coordinates(browser)
    assert set(drawn) == set(PLOTS)
    for name, values in drawn.items():
        assert len(values) > 4, name
        assert not [v for v in values if re.search(r"NaN|Infinity|undefined|null", v)], name


@pytest.mark.parametrize("width", [1280, 360])
def test_every_plot_is_drawn(opened, grid, width, browser):
    resize(browser, width)
    browser = opened(grid)
    assert_every_plot_is_drawn(browser)
    marks = browser.execute_script(
        "return document.querySelectorAll('#by-sparsity .series path.mark').length"
    )
    assert marks == 12  # four methods at three sparsities
    assert len(texts(browser, "#by-sparsity .bars")) == 12  # of two seeds each


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(opened, grid, width, browser):
    resize(browser, width)
    browser = opened(grid)
    click(browser, "#runs button.open")
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width


def test_table_equals_compare(opened, grid):
    browser = opened(grid)
    (setting,) = compare(find_records([grid]))
    shown = dict(zip(column(browser, "headline", 1), column(browser, "headline", 3), strict=True))
    for index, cell in enumerate(setting.cells):
        if cell.sparsity == 0.95:
            star = "★ " if index in setting.best else ""
            expected = f"{star}{rounded(cell.mean)} ± {rounded(cell.deviation)}"
            assert shown[cell.label] == expected


def test_every_sparsity_has_a_tile(opened, tmp_path):
    levels = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
    write_grid(tmp_path, methods=("dense", "probmask", "gmp"), sparsities=levels, seeds=(0,))
    browser = opened(tmp_path)
    expected = ["dense", *(f"best at {100 * level:g} %" for level in levels)]
    shown = [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts(browser, "#tiles .what")]
    assert shown == expected


def test_unequal_numbers_of_seeds_are_shown(opened, tmp_path):
    write_grid(tmp_path / "two", methods=("probmask",), sparsities=(0.9, 0.98))
    write_grid(tmp_path / "one", methods=("gmp",), sparsities=(0.9, 0.98), seeds=(0,))
    browser = opened(tmp_path)
    assert sorted(text.rsplit(" ", 1)[1] for text in column(browser, "headline", 2)) == [
        "(1)",
        "(2)",
    ]
    assert "seeds (their number in parentheses)" in browser.find_element("id", "headline-note").text


def test_table_of_two_sparsities_fits_a_phone(opened, tmp_path, browser):
    write_grid(tmp_path, methods=("probmask", "gmp"), sparsities=(0.9, 0.98))
    resize(browser, 375)
    browser = opened(tmp_path)
    box = "document.getElementById('headline').closest('.scroll')"
    assert browser.execute_script(f"return {box}.scrollWidth <= {box}.clientWidth")


def test_tables_are_sorted_by_their_headings(opened, grid):
    browser = opened(grid)
    click(browser, '#headline [data-sort="0.98 params"]')
    figures = [float(t.lstrip("★ ").split()[0]) for t in column(browser, "headline", 4)]
    assert figures == sorted(figures, reverse=True)
    click(browser, '#headline [data-sort="0.98 params"]')
    assert [float(t.lstrip("★ ").split()[0]) for t in column(browser, "headline", 4)] == (
        figures[::-1]
    )
    heading = "#headline th[aria-sort='ascending']"
    assert texts(browser, heading) == ["98 %"]
    click(browser, '#runs [data-sort="accuracy"]')
    runs = [float(text) for text in column(browser, "runs", 5)]
    assert len(runs) == 26
    assert runs == sorted(runs, reverse=True)


def test_filters_and_reset(opened, grid):
    browser = opened(grid)
    everything = texts(browser, "#headline")
    click(browser, "#methods .chip:nth-child(2)")
    (method,) = texts(browser, "#methods .chip[aria-pressed='true']")
    assert set(column(browser, "runs", 2)) == {method}
    assert texts(browser, "#count") == ["6 of 26 runs"]
    assert set(texts(browser, "#by-sparsity .label")) == {method}
    click(browser, "#sparsities .chip[data-value='0.95']")
    click(browser, "#seeds .chip[data-value='1']")
    assert texts(browser, "#count") == ["1 of 26 runs"]
    assert column(browser, "headline", 4) == ["1"]  # one seed, so no deviation
    click(browser, "#reset")
    assert texts(browser, "#headline") == everything
    search = browser.find_element(By.ID, "search")
    search.send_keys("rigl-0.98")
    wait_for(lambda: texts(browser, "#count") == ["2 of 26 runs"])
    assert column(browser, "runs", 1) == ["rigl-0.98-seed0", "rigl-0.98-seed1"]
    search.clear()
    search.send_keys("momentum=0.9")  # a setting that all runs share
    wait_for(lambda: texts(browser, "#count") == ["26 runs"])
    search.send_keys(" nothing is called so")
    wait_for(lambda: texts(browser, "#count") == ["0 of 26 runs"])
    assert texts(browser, "#by-sparsity .empty") == ["No sparse run is in view."]


def wait_for(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_tooltips_by_mouse_and_keyboard(opened, grid):
    browser = opened(grid)
    plot = browser.find_element(By.CSS_SELECTOR, "#by-sparsity svg")
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", plot)
    plot.send_keys(Keys.ARROW_RIGHT)
    first = texts(browser, "#tip *")
    assert re.fullmatch(r"\d\d\.\d\d ± \d\.\d\d % at 90 %", first[1])
    plot.send_keys(Keys.ARROW_RIGHT)
    assert texts(browser, "#tip *") != first
    plot.send_keys(Keys.ESCAPE)
    assert not browser.find_element(By.ID, "tip").is_displayed()
    browser.execute_script(
        """const mark = document.querySelector("#by-sparsity path.mark").getBoundingClientRect();
        document.querySelector("#by-sparsity svg").dispatchEvent(new PointerEvent("pointermove", {
          clientX: mark.x + mark.width / 2, clientY: mark.y + mark.height / 2 }));"""
    )
    assert browser.find_element(By.ID, "tip").is_displayed()


def test_epoch_slider(opened, grid):
    browser = opened(grid)
    heights = "return [...document.querySelectorAll('#histogram .bar')].map((b) => b.outerHTML)"
    last = browser.execute_script(heights)
    browser.execute_script(
        """const slider = document.querySelector("#histogram input");
        slider.value = 0; slider.dispatchEvent(new Event("input"));"""
    )
    assert texts(browser, "#histogram .slider output") == ["1"]
    assert browser.execute_script(heights) != last


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(opened, grid, scheme, browser):
    prefer(browser, scheme)
    browser = opened(grid)
    other = {"light": "dark", "dark": "light"}[scheme]
    theme = "return document.documentElement.dataset.theme"
    assert browser.execute_script(theme) == scheme
    assert_colors_can_be_seen(browser)
    click(browser, "#theme")
    assert browser.execute_script(theme) == other
    assert_colors_can_be_seen(browser)


def assert_colors_can_be_seen(browser):
    """WCAG 2 requires 4.5:1 for text and 3:1 for marks."""
    colors = browser.execute_script(
        """const probe = document.createElement("span"), found = {};
        document.body.append(probe);
        for (const name of ["ground", "card", "ink", "soft", "accent", "best", "c0", "c1", "c2",
                            "c3", "c4", "c5", "c6"]) {
          probe.style.color = `var(--${name})`;
          found[name] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
        }
        probe.remove();
        return found;"""
    )
    for name in ("ink", "soft", "accent", "best"):
        assert contrast(colors[name], colors["card"]) > 4.5, name
        assert contrast(colors[name], colors["ground"]) > 4.5, name
    for number in range(7):
        assert contrast(colors[f"c{number}"], colors["card"]) > 3, number


def test_plots_are_saved_as_svg_and_png(opened, grid, downloads):
    browser = opened(grid)
    for form in ("SVG", "PNG"):
        browser.execute_script(
            """[...document.querySelectorAll("#by-sparsity .plot-tools button")]
            .find((button) => button.textContent === arguments[0]).click()""",
            form,
        )
        saved = downloads / f"probmask-by-sparsity.{form.lower()}"
        wait_for(saved.exists)
        wait_for(lambda file=saved: file.stat().st_size > 0)
    picture = ElementTree.fromstring((downloads / "probmask-by-sparsity.svg").read_bytes())
    marks = [node for node in picture.iter() if node.get("transform")]
    assert len(marks) == 12
    assert all(node.get("fill", "").startswith("rgb") for node in marks)  # needs no style sheet
    assert (downloads / "probmask-by-sparsity.png").read_bytes().startswith(b"\x89PNG")


def test_names_are_never_markup(opened, tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    for name, sparsity in (("<script>alert(1)</script>", 0.98), ("other", 0.9)):
        made = record("gmp", sparsity, model=evil)
        made["config"].update(model=evil, data_args={"note": evil})
        made["layers"][0]["name"] = evil
        write(tmp_path / "runs" / name, made)  # the slash makes two directories of it
    browser = opened(tmp_path / "runs")
    click(browser, "#runs button.open")
    assert "<script>alert(1)</script>" in texts(browser, "#runs button.open")
    assert texts(browser, "#title") == [f"{evil} on cifar10"]
    assert evil in texts(browser, "#runs dd")
    assert browser.execute_script("return [document.scripts.length, document.images.length]") == [
        2,
        0,
    ]


def test_page_of_one_run(opened, tmp_path):
    browser = opened(write(tmp_path / "alone", record()))
    assert_every_plot_is_drawn(browser)
    assert texts(browser, "#count") == ["1 run"]
    click(browser, "#runs button.open")
    settings = dict(zip(texts(browser, "#runs dt"), texts(browser, "#runs dd"), strict=True))
    assert settings["method.sparsity"] == "0.98"
    assert settings["optimizer.lr"] == "0.1"


def test_page_of_one_dense_run(opened, tmp_path):
    browser = opened(write(tmp_path / "dense", record("dense", 0.0)))
    assert len(column(browser, "headline", 1)) == 1


def test_long_names_are_not_truncated_on_a_phone(opened, tmp_path):
    for seed in (0, 1):
        write(
            tmp_path / f"cifar10-resnet14-probmask-scope=layer-0.98-seed{seed}", record(seed=seed)
        )
    browser = opened(tmp_path)
    resize(browser, 390)
    cut = browser.execute_script(
        """return [...document.querySelectorAll("#runs td.name:first-child, #runs button.open")]
        .filter((each) => each.scrollWidth > each.clientWidth + 1).length"""
    )
    assert cut == 0


def test_numbers_and_units_are_not_separated(opened, grid):
    browser = opened(grid)
    (heading,) = texts(browser, "#size h3")
    assert heading.endswith("\u00a0% sparsity")
    assert "Dense needs 1.29\u00a0M." in texts(browser, "#by-macs figcaption")[0]


def test_latency_is_shown(opened, tmp_path):
    timed = {"milliseconds": 1.25, "batch": 1}
    write(tmp_path / "runs" / "a", record(latency=timed))
    dense = record("dense", 0.0, latency={**timed, "milliseconds": 5.0})
    write(tmp_path / "runs" / "b", dense)
    browser = opened(tmp_path / "runs")
    assert "1.25 ms · 4.0× faster" in texts(browser, "#speed .value")
    assert "forward pass" in texts(browser, "#runs th")
    assert "1.25 ms" in texts(browser, "#runs td")


def test_selecting_a_setting(opened, tmp_path):
    write_grid(tmp_path / "short", ["probmask", "gmp"])
    write_grid(tmp_path / "long", ["probmask", "gmp"], epochs=60)
    browser = opened(tmp_path)
    assert len(texts(browser, "#setting option")) == 2
    assert texts(browser, "#count") == ["12 runs"]
    assert "30 epochs" in texts(browser, "#details")[0]
    browser.execute_script(
        """const select = document.getElementById("setting");
        select.value = "1"; select.dispatchEvent(new Event("change"));"""
    )
    assert "60 epochs" in texts(browser, "#details")[0]


def test_time_with_two_thousand_runs(opened):
    browser = opened(*thousands(epochs=10))
    assert texts(browser, "#count") == ["2,000 runs"]
    assert_every_plot_is_drawn(browser)
    timing = browser.execute_script(
        "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    )
    assert timing < 20_000  # one or two seconds on an idle machine
    assert len(column(browser, "runs", 1)) == 50
    click(browser, "#more")
    assert len(column(browser, "runs", 1)) == 250
