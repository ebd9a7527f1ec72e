"use strict";
// Says where a picture, a table or a block of code goes on to the right. The page reads without.
document.addEventListener("DOMContentLoaded", () => {
  const pictures = [...document.querySelectorAll('article p > img[src$=".svg"]')].map((picture) => picture.parentElement);
  for (const wide of [...pictures, ...document.querySelectorAll("article .table-wrapper, article .highlight > pre")]) {
    const sign = Object.assign(document.createElement("p"), { className: "goes-on", textContent: "goes on to the right \u2192" });
    if (wide.tagName !== "PRE") wide.before(sign);
    const show = () => {
      const cut = wide.scrollWidth > wide.clientWidth + 1;
      sign.hidden = !cut;
      wide.classList.toggle("is-cut", cut);
    };
    show();
    new ResizeObserver(show).observe(wide);
    for (const picture of wide.querySelectorAll("img")) picture.addEventListener("load", show);
  }
});
