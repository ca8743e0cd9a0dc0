// Tables that their headings sort.

/** Fill a table whose headings sort it. columns: [{name, title, value, show, text}]. */
function fillTable(table, { columns, rows, order, change, rowOf, label, foot = [] }) {
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

/** What is not known comes last, whichever way; figures by size, text as people sort it. */
function compared(a, b, sign) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

const methodCell = (cell) =>
  element("td", { class: "name", title: cell.label }, key(cell.method), cell.label);
