// Sets the theme before the first paint, and switches it: system, light, dark.

(() => {
  const KEY = "mlxrunner.theme";
  const THEMES = ["system", "light", "dark"];
  const SIGNS = { system: "◐", light: "○", dark: "●" };
  const root = document.documentElement;
  const read = () => (THEMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system");

  function apply(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Theme: ${theme}`);
  }

  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    apply(read());
    document.getElementById("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(read()) + 1) % THEMES.length];
      localStorage.setItem(KEY, next);
      apply(next);
    });
  });
})();
