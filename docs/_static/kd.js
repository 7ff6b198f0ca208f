// A button at each block of code that copies what a reader types: no prompts, no output.
"use strict";

function typed(text) {
  const lines = text.replace(/\n+$/, "").split("\n");
  if (!lines.some((line) => line.startsWith(">>> "))) return lines.join("\n");
  return lines
    .filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
    .map((line) => line.slice(4))
    .join("\n");
}

document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return;
  for (const block of document.querySelectorAll("article div.highlight")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "kd-copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(typed(block.querySelector("pre").textContent));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
