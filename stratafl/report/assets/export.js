"use strict";
// The summary for other programs, letter by letter what the command line writes beside its figures.

const SPECIAL = {
  "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", _: "\\_", "{": "\\{", "}": "\\}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
  "<": "$<$", ">": "$>$", "±": "$\\pm$", "−": "$-$", "—": "---", "…": "\\dots{}",
};

// A column of means, and one of standard deviations where there are any; what is no number is as the table shows it.
function summaryCsv() {
  const columns = allColumns();
  const spread = columns.map((column) => column.cells.some((cell) => cell.deviation !== null));
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const number = (value) => String(Number(value.toPrecision(12)));
  // a text that no spreadsheet takes for a formula
  const safe = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const rows = [columns.flatMap((column, place) => [column.title, ...(spread[place] ? [`${column.title}, std`] : [])])];
  columns[0].cells.forEach((_, row) => rows.push(columns.flatMap(({ cells }, place) => {
    const { text, mean, deviation } = cells[row];
    return [mean === null ? safe(text) : number(mean), ...(spread[place] ? [deviation === null ? "" : number(deviation)] : [])];
  })));
  return rows.map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

// A tabular with the rules of booktabs; the best of each column is bold.
function summaryLatex() {
  const columns = allColumns();
  const latex = (text) => [...text].map((letter) => SPECIAL[letter] ?? letter).join("");
  const best = columns.map(bestIn);
  const cell = ({ text }, isBest) => {
    const [value, spread] = text.split(" ± ");
    return (isBest ? `\\textbf{${latex(value)}}` : latex(value)) + (spread === undefined ? "" : ` $\\pm$ ${latex(spread)}`);
  };
  const rows = columns[0].cells.map((_, row) => `${columns.map(({ cells }, place) => cell(cells[row], best[place].has(row))).join(" & ")} \\\\`);
  const head = `${columns.map(({ title }) => latex(title)).join(" & ")} \\\\`;
  return ["% needs \\usepackage{booktabs}", `\\begin{tabular}{l${"r".repeat(columns.length - 1)}}`, "\\toprule", head, "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

async function copied(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // a page that is a file may have no clipboard; the old way works there
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = before; }, 1200);
}

byId("save-csv").addEventListener("click", () => download("summary.csv", summaryCsv(), "text/csv"));
byId("save-latex").addEventListener("click", () => download("summary.tex", summaryLatex(), "text/plain"));
byId("copy-latex").addEventListener("click", (event) => copied(summaryLatex(), event.currentTarget));
byId("metric").addEventListener("change", (event) => {
  state.metric = event.target.value;
  drawAll();
});
byId("target").addEventListener("input", (event) => chooseTargets(event.target.value));
