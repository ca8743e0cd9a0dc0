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
