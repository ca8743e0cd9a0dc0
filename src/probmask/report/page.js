// The page: the runs that pass the filters, and redrawing when the filters change.

// Means and standard deviations, by the same rules as `probmask compare`.

/** The compensated sum (Neumaier). */
function sum(values) {
  let total = 0,
    lost = 0;
  for (const value of values) {
    const next = total + value;
    lost += Math.abs(total) >= Math.abs(value) ? total - next + value : value - next + total;
    total = next;
  }
  return total + lost;
}

const mean = (values) => (values.length ? sum(values) / values.length : null);

/** The sample standard deviation; null for fewer than two values. */
function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(sum(values.map((value) => (value - middle) ** 2)) / (values.length - 1));
}

/** The mean of the known values; null if none are known. */
const meanKnown = (values) => mean(values.filter(known));

// The view: the runs that pass the filters, and their cells.

// The number of rows that a table shows at first.
const PAGE = 50;

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const state = {
  setting: 0,
  text: "",
  methods: new Set(),
  sparsities: new Set(),
  seeds: new Set(),
  focus: null,
  curve: null,
  histogram: null,
  page: PAGE,
  open: new Set(),
  cellsShown: PAGE,
  cells: { by: "sparsity", sign: 1 },
  crossed: { by: null, sign: 1 },
  runs: { by: "name", sign: 1 },
};

const RUN_FIELDS = [
  "name",
  "setting",
  "cellIndex",
  "seed",
  "accuracy",
  "validation",
  "kept",
  "macs",
  "bytes",
  "seconds",
  "latency",
  "config",
];
const RUNS = DATA.runs.map((values, index) => {
  const run = Object.fromEntries(RUN_FIELDS.map((name, i) => [name, values[i]]));
  const source = DATA.settings[run.setting].cells[run.cellIndex];
  return { ...run, index, source, label: DATA.methods[source.method] };
});

/** The text in which words are searched. */
const wordsOf = (run) =>
  [run.name, run.label, `seed ${run.seed}`, percent(run.source.sparsity)].join("\n").toLowerCase();

/** The settings in which "lr=0.1" is searched; equal for all runs of a variant. */
const SETTINGS = new Map();
function settingWordsOf(run) {
  if (!SETTINGS.has(run.config)) {
    const { own, shared } = configurationOf(run);
    SETTINGS.set(
      run.config,
      [...own, ...shared]
        .map(([key, value]) => `${key}=${value}`)
        .join("\n")
        .toLowerCase(),
    );
  }
  return `seed=${run.seed}\n${SETTINGS.get(run.config)}`;
}

function found(run, text) {
  return (
    !text ||
    wordsOf(run).includes(text) ||
    (text.includes("=") && settingWordsOf(run).includes(text))
  );
}

const chosen = (set, value) => set.size === 0 || set.has(value);

let lastView = null;
const currentView = () => lastView;

/** The runs in view and their cells, over which means are taken. */
function makeView() {
  const setting = DATA.settings[state.setting];
  const text = state.text.trim().toLowerCase();
  const runs = RUNS.filter(
    (run) =>
      run.setting === state.setting &&
      chosen(state.methods, run.source.method) &&
      chosen(state.sparsities, run.source.sparsity) &&
      chosen(state.seeds, run.seed) &&
      found(run, text),
  );
  const groups = new Map();
  for (const run of runs) {
    if (!groups.has(run.cellIndex)) groups.set(run.cellIndex, []);
    groups.get(run.cellIndex).push(run);
  }
  const cells = [...groups]
    .map(([index, members]) => {
      const accuracies = members.map((run) => run.accuracy);
      const source = setting.cells[index];
      const cell = {
        ...source,
        index,
        n: members.length,
        total: source.n,
        label: DATA.methods[source.method],
        accuracies,
        mean: mean(accuracies),
        deviation: deviation(accuracies),
        best: false,
        ...Object.fromEntries(
          ["kept", "macs", "bytes", "seconds", "latency"].map((name) => [
            name,
            meanKnown(members.map((run) => run[name])),
          ]),
        ),
      };
      for (const run of members) run.cell = cell;
      return cell;
    })
    .sort((a, b) => a.sparsity - b.sparsity || a.method - b.method);
  markBest(cells);
  return { setting, runs, cells };
}

/** Only cells of equal level are ranked against each other. */
const levelOf = (cell) => `${cell.sparsity} ${cell.cost}`;

/** Mark the highest mean of each level with several verified cells. */
function markBest(cells) {
  const levels = new Map();
  for (const cell of cells.filter((each) => each.verified)) {
    const level = levelOf(cell);
    levels.set(level, [...(levels.get(level) || []), cell]);
  }
  for (const ranked of levels.values()) {
    const top = Math.max(...ranked.map((cell) => cell.mean));
    if (ranked.length > 1) for (const cell of ranked) cell.best = cell.mean === top;
  }
}

const sparsityLevels = (view) =>
  [...new Set(view.cells.map((cell) => cell.sparsity))]
    .filter((level) => level > 0)
    .sort((a, b) => a - b);

/** The cells of the focused sparsity, optionally with the dense ones. */
function focusCells(view, withDense = false) {
  const level = focusLevel(view);
  return view.cells.filter((cell) => cell.sparsity === level || (withDense && cell.sparsity === 0));
}

/** The selected sparsity if it is in view, otherwise the highest that most methods have. */
function focusLevel(view) {
  const levels = sparsityLevels(view);
  if (levels.includes(state.focus)) return state.focus;
  const methods = (level) => view.cells.filter((cell) => cell.sparsity === level).length;
  return levels.reduce((a, b) => (a === null || methods(b) >= methods(a) ? b : a), null) ?? 0;
}

const focusText = (view) =>
  focusLevel(view) === 0 ? "no sparsity" : `${percent(focusLevel(view))} sparsity`;

// The filters, and everything that is drawn.

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
