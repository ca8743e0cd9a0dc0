// Tables that can be sorted by their headings.

/**
 * Fill a table with sortable columns: [{name, title, value, show, text}]. `order` is the key of the
 * state that holds the sort order; `redraw` draws the table again.
 */
function fillTable(id, { columns, rows, order: kept, redraw, rowOf, label, foot = [] }) {
  const table = document.getElementById(id),
    order = state[kept];
  const change = (by) => {
    state[kept] = by;
    redraw(currentView());
  };
  const column = columns.find((each) => each.name === order.by);
  const sorted = column
    ? [...rows].sort((a, b) => compared(column.value(a), column.value(b), order.sign))
    : rows;
  const heads = columns.map((each) =>
    element(
      "th",
      {
        scope: "col",
        class: each.text ? "name" : null,
        "aria-sort": each === column ? (order.sign > 0 ? "ascending" : "descending") : "none",
      },
      element(
        "button",
        {
          type: "button",
          "data-sort": each.name,
          onclick: () =>
            change({ by: each.name, sign: each === column ? -order.sign : each.text ? 1 : -1 }),
        },
        each.title,
      ),
    ),
  );
  const focused = table.contains(document.activeElement)
    ? document.activeElement.dataset.sort
    : null;
  table.replaceChildren(
    element("caption", { class: "hidden" }, label),
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rowOf(sorted)),
    element("tfoot", {}, ...foot),
  );
  if (focused) table.querySelector(`[data-sort="${focused}"]`)?.focus();
}

/** Compare values: unknown ones last in either direction, numbers by size, text by locale. */
function compared(a, b, sign) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

/** Columns of cells and runs: weights, MACs, file size, time. */
const costColumns = (rows, weights) =>
  [
    { name: "kept", title: weights, show: (row) => whole(row.kept) },
    { name: "macs", title: "MACs", show: (row) => counted(row.macs) },
    { name: "bytes", title: "file", show: (row) => bytes(row.bytes) },
    { name: "latency", title: "forward pass", show: (row) => milliseconds(row.latency) },
    { name: "seconds", title: "trained in", show: (row) => lasting(row.seconds) },
  ]
    .map((column) => ({ ...column, value: (row) => row[column.name] }))
    .filter((column) => column.name !== "latency" || rows.some((row) => known(row.latency)));

const milliseconds = (value) => (known(value) ? `${fixed(value)} ms` : "–");

/** A row of the table; a column returns a text or a whole cell. */
const rowBy = (columns, row) =>
  element(
    "tr",
    {},
    ...columns.map((column) => {
      const shown = column.show(row);
      return shown instanceof HTMLTableCellElement ? shown : element("td", {}, shown);
    }),
  );

/** Show a button that adds the next `step` rows. */
function offerMore(id, left, step = left) {
  const more = document.getElementById(id);
  more.hidden = left <= 0;
  more.textContent = `Show ${whole(Math.min(left, step))} more`;
}

const methodCell = (cell) =>
  element("td", { class: "name", title: cell.label }, key(cell.method), cell.label);
