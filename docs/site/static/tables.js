// SPDX-License-Identifier: Apache-2.0
// On a phone a table of sentences shows each row as a block (site.css), in which cells carry the headings of their columns.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".content table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map(heading => heading.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    const fits = headings.length < 3 && table.scrollWidth <= table.clientWidth;
    if (fits || !cells.some(cell => cell.textContent.length > 40)) continue;
    table.classList.add("of-sentences");
    for (const cell of cells) {
      cell.dataset.heading = headings[cell.cellIndex] ?? "";
      cell.classList.toggle("is-empty", cell.textContent.trim() === "");
    }
  }
});
