"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const one = (id) => document.getElementById(id);

  // copy a command
  for (const button of all(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {  // no clipboard in a file: leave the text selected
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // say what a cell is
  const says = one("cell-says");
  const name = (cell) => {
    const row = cell.closest("tr"), table = cell.closest("table");
    const column = [...row.cells].indexOf(cell.closest("td")) - 1;
    const comm = table.rows[0].cells[1 + Math.floor(column / 3)].textContent;
    const fmt = table.rows[1].cells[1 + column].textContent;
    return [comm, fmt, row.cells[0].title, table.dataset.feature].filter(Boolean).join(" · ");
  };
  const tell = (event) => {
    const cell = event.target.closest?.(".c");
    if (!cell) return;
    const words = `${name(cell)}: ${cell.title || "not exercised"}`;
    if (cell.closest(".large")) says.textContent = words;
    else cell.title = cell.title.includes("\n") ? cell.title : `${name(cell)}\n${cell.title || "not exercised"}`;
  };
  document.addEventListener("pointerover", tell);
  document.addEventListener("click", tell);

  // a failing cell shows its problems alone
  const filter = one("filter");
  const problems = all("[data-number]");
  const show = (numbers, words) => {
    for (const problem of problems) problem.hidden = numbers !== null && !numbers.has(problem.dataset.number);
    if (!filter) return;
    filter.hidden = numbers === null;
    filter.firstElementChild.textContent = words;
    const brief = one("brief");
    if (brief) brief.open = numbers !== null && all("li:not([hidden])", brief).length > 0;
  };
  filter?.querySelector("button").addEventListener("click", () => show(null, ""));
  for (const cell of all("a.c")) {
    cell.addEventListener("click", (event) => {
      event.preventDefault();
      const numbers = new Set(cell.dataset.f.split(" "));
      show(numbers, `${name(cell)}: ${numbers.size === 1 ? "1 problem" : `${numbers.size} problems`}`);
      one("failures").scrollIntoView();
    });
  }
  const open = () => {  // a link to a problem opens the list that it is in
    const target = location.hash.startsWith("#p") && one(location.hash.slice(1));
    if (target) {
      target.closest("details")?.setAttribute("open", "");
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  open();

  // say what a pair is
  const data = JSON.parse(one("pair-counts").textContent);
  const picture = document.querySelector("svg.pairs");
  const others = {r: "came only in problems that were refused", n: "never came", i: "cannot be"};
  const pair = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
    const cell = Number(picture.dataset.cell), left = Number(picture.dataset.left);
    const column = Math.floor((at.x - left) / cell), row = Math.floor(at.y / cell);
    const count = data.counts[row]?.[column];
    const cross = picture.querySelector(".cross");
    cross.setAttribute("d", count === undefined ? "" : `M0 ${row * cell + 5}H${column * cell + 5}V${data.names.length * cell}`);
    if (count === undefined) return;
    const words = others[count] ?? `${count} problem${count === 1 ? "" : "s"}`;
    one("pair-says").textContent = `${data.names[column]}, with ${data.names[row]}: ${words}`;
  };
  picture.addEventListener("pointermove", pair);
  picture.addEventListener("click", pair);
})();
