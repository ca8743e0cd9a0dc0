// The page: state of the filters, and redrawing when it changes.

function drawFocus(view) {
  const levels = sparsityLevels(view),
    level = focusLevel(view);
  byId("focus").replaceChildren(
    ...(levels.length ? levels : [0]).map((each) =>
      element("option", { value: each, selected: each === level }, `${percent(each)} sparsity`),
    ),
  );
}

function drawFocused() {
  drawLayers(lastView);
  drawCurves(lastView);
  drawHistogram(lastView);
  drawSize(lastView);
  drawSpeed(lastView);
}

function draw() {
  hideTip();
  lastView = makeView();
  const total = RUNS.filter((run) => run.setting === state.setting).length;
  byId("count").textContent =
    lastView.runs.length === total
      ? `${whole(total)} ${total === 1 ? "run" : "runs"}`
      : `${whole(lastView.runs.length)} of ${whole(total)} runs`;
  drawTiles(lastView);
  drawHeadline(lastView);
  drawBySparsity(lastView);
  drawByMacs(lastView);
  drawFocus(lastView);
  drawFocused();
  drawRuns(lastView);
}

function chip(set, value, children, hover = {}) {
  return element(
    "button",
    {
      type: "button",
      class: "chip",
      "aria-pressed": String(set.has(value)),
      "data-value": value,
      ...hover,
      onclick: (event) => {
        set[set.has(value) ? "delete" : "add"](value);
        event.currentTarget.setAttribute("aria-pressed", String(set.has(value)));
        state.page = PAGE;
        draw();
      },
    },
    ...children,
  );
}

/** Highlight a method in every plot. */
function emphasize(method) {
  for (const svg of document.querySelectorAll(".plot svg")) {
    const own = [...svg.querySelectorAll(`.series[data-method="${method}"]`)];
    svg.classList.toggle("focused", own.length > 0 && method !== null);
    svg
      .querySelectorAll(".series")
      .forEach((node) => node.classList.toggle("on", own.includes(node)));
  }
}

function drawFilters() {
  const runs = RUNS.filter((run) => run.setting === state.setting);
  const distinct = (value) => [...new Set(runs.map(value))].sort((a, b) => a - b);
  const methods = distinct((run) => run.source.method),
    levels = distinct((run) => run.source.sparsity),
    seeds = distinct((run) => run.seed);
  byId("methods").replaceChildren(
    ...methods.map((method) =>
      chip(
        state.methods,
        method,
        [key(method), element("span", { title: DATA.methods[method] }, DATA.methods[method])],
        {
          onpointerenter: () => emphasize(method),
          onpointerleave: () => emphasize(null),
        },
      ),
    ),
  );
  const row = (label, set, values, text) =>
    values.length > 1
      ? [
          element("span", { class: "chips-label" }, label),
          ...values.map((value) => chip(set, value, [element("span", {}, text(value))])),
        ]
      : [];
  byId("sparsities").replaceChildren(
    ...row("sparsity", state.sparsities, levels, (level) =>
      level === 0 ? "dense" : percent(level),
    ),
  );
  byId("seeds").replaceChildren(...row("seed", state.seeds, seeds, String));
}

function drawSetting() {
  const setting = DATA.settings[state.setting];
  byId("title").textContent = setting.title;
  byId("details").textContent = setting.details.join(" · ");
  drawFilters();
  draw();
}

/** The theme of the system, until the reader chooses one. */
function setUpTheme() {
  const root = document.documentElement,
    button = byId("theme"),
    dark = matchMedia("(prefers-color-scheme: dark)");
  let wanted = null;
  const apply = () => {
    root.dataset.theme = wanted || (dark.matches ? "dark" : "light");
    button.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    wanted = root.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

function setUp() {
  setUpTheme();
  const forget = () => {
    for (const set of [state.methods, state.sparsities, state.seeds, state.open]) set.clear();
    Object.assign(state, { text: "", page: PAGE });
    byId("search").value = "";
  };
  byId("setting-field").hidden = DATA.settings.length < 2;
  byId("setting").replaceChildren(
    ...DATA.settings.map((setting, i) =>
      element("option", { value: i }, [setting.title, ...setting.details].join(" · ")),
    ),
  );
  byId("setting").addEventListener("change", (event) => {
    forget();
    state.setting = Number(event.target.value);
    drawSetting();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  let waiting = 0;
  byId("search").addEventListener("input", (event) => {
    state.text = event.target.value;
    state.page = PAGE;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 120);
  });
  byId("reset").addEventListener("click", () => {
    forget();
    drawFilters();
    draw();
  });
  byId("focus").addEventListener("change", (event) => {
    state.focus = Number(event.target.value);
    drawFocused();
  });
  byId("more-cells").addEventListener("click", () => {
    state.cellsShown = Infinity;
    drawHeadline(lastView);
  });
  byId("more").addEventListener("click", () => {
    state.page += 4 * PAGE;
    drawRuns(lastView);
  });
  byId("footer").textContent =
    `Made by probmask ${DATA.version} from ${whole(RUNS.length)} ${RUNS.length === 1 ? "record" : "records"}. This file is self-contained and loads nothing.`;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      draw();
    }
  });
  drawSetting();
}

setUp();
