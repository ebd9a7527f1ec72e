"use strict";
// Sorts a table by a column when its head is pressed, and leaves out the rows that lack a word. The page reads without.

const MANY = 8; // rows: longer tables get a field that filters them
const NEXT = { ascending: "descending", descending: null };

function cellAt(row, column) {
  for (const cell of row.cells) if ((column -= cell.colSpan) < 0) return cell;
}

/** Negative where a stands before b: numbers by their value, then words, then what is empty. */
function compared(a, b, sign) {
  const [rank, other] = [a, b].map((cell) => (cell?.dataset.value ? 0 : /[^-\s]/.test(cell?.textContent) ? 1 : 2));
  if (rank !== other) return rank - other;
  if (rank) return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  const [x, y] = [a, b].map((cell) => Number(cell.dataset.value));
  return x === y ? 0 : sign * (x < y ? -1 : 1);
}

function sortable(table) {
  const body = table.tBodies[0], asMade = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.title = "sort by this column: ascending, descending, as it was";
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort"), next = now ? NEXT[now] : "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      const sign = next === "descending" ? -1 : 1;
      const by = (a, b) => compared(cellAt(a, column), cellAt(b, column), sign);
      body.append(...(next ? [...asMade].sort(by) : asMade));
      if (next) head.setAttribute("aria-sort", next);
    });
  });
}

function filterable(table) {
  const rows = [...table.tBodies[0].rows], bar = document.createElement("p");
  const field = document.createElement("input"), shown = document.createElement("output");
  Object.assign(field, { type: "search", placeholder: "filter rows" });
  field.setAttribute("aria-label", "filter the rows of the table below");
  bar.className = "filter";
  bar.append(field, shown);
  table.closest(".wide").before(bar);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    shown.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
}

for (const table of document.querySelectorAll("table")) {
  if (table.tHead) sortable(table);
  if (table.tBodies[0].rows.length > MANY) filterable(table);
}
