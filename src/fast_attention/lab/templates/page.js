"use strict";
// Sorts a table by a column when its head is pressed; says where a table or a picture goes on. The page reads without.
const NEXT = { ascending: "descending", descending: null };

/** Negative where a stands before b: numbers by their value, then words, then what is empty. */
function compared(a, b, sign) {
  const [rank, other] = [a, b].map((cell) => (cell?.dataset.value ? 0 : /[^-\s]/.test(cell?.textContent) ? 1 : 2));
  if (rank !== other) return rank - other;
  if (rank) return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  const [x, y] = [a, b].map((cell) => Number(cell.dataset.value));
  return x === y ? 0 : sign * (x < y ? -1 : 1);
}

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], asMade = [...body.rows], heads = [...(table.tHead?.rows[0].cells ?? [])];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.title = "sort by this column: ascending, descending, as it was";
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort"), next = now ? NEXT[now] : "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      const by = (a, b) => compared(a.cells[column], b.cells[column], next === "descending" ? -1 : 1);
      body.append(...(next ? [...asMade].sort(by) : asMade));
      if (next) head.setAttribute("aria-sort", next);
    });
  });
}

for (const wide of document.querySelectorAll(".wide")) {
  const sign = Object.assign(document.createElement("p"), { className: "more", textContent: "goes on to the right \u2192" });
  wide.before(sign);
  const show = () => {
    const cut = wide.scrollWidth > wide.clientWidth + 1;
    sign.hidden = !cut;
    wide.classList.toggle("cut", cut);
  };
  show();
  new ResizeObserver(show).observe(wide);
}
