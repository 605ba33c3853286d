// @ts-check
/** Code of both pages: light and dark theme, and the dialog for an API key. */

import { onKeyWanted } from "./api.js";
import { byId, el, local } from "./dom.js";

const THEME = "martlet.theme";
const THEMES = ["auto", "light", "dark"];

/** Make the button that switches between light, dark and the system's theme. */
function startTheme() {
  const button = byId("theme");
  let theme = local.get(THEME) ?? "auto";
  const show = () => {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme] ?? "◐";
    button.setAttribute("aria-label", `Colours: ${theme}`);
    button.title = `Colours: ${theme}`;
    window.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    local.set(THEME, theme);
    show();
  });
  show();
}

/** @type {Promise<string | null> | null} */
let asking = null;

/**
 * Ask for the API key, once for all waiting requests.
 * @param {boolean} wrong
 * @returns {Promise<string | null>}
 */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const input = /** @type {HTMLInputElement} */ (
      el("input", { type: "password", id: "key", name: "key", autocomplete: "off", required: true, spellcheck: "false" })
    );
    const said = wrong ? "This key was refused. Give another one:" : "This server wants a key from those who use it:";
    const dialog = /** @type {HTMLDialogElement} */ (
      el(
        "dialog",
        { class: "box", "aria-labelledby": "key-title" },
        el(
          "form",
          { method: "dialog" },
          el("h2", { id: "key-title" }, "API key"),
          el("label", { for: "key" }, said),
          input,
          el("p", { class: "note" }, "It is kept until this tab is closed."),
          el("button", { type: "submit", class: "primary" }, "Use it"),
        ),
      )
    );
    dialog.addEventListener("close", () => {
      asking = null;
      dialog.remove();
      resolve(input.value.trim() || null);
    });
    dialog.addEventListener("cancel", () => (input.value = ""));
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
  return asking;
}

/** Call it once the page is loaded. */
export function startPage() {
  onKeyWanted(askForKey);
  startTheme();
}
