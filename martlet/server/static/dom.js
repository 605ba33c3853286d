// @ts-check
/** Makes elements from text and attributes: these pages never parse HTML. */

/**
 * Make an element. In `props`, functions are event handlers, true is an empty attribute, and false
 * and null are left out.
 * @param {string} tag
 * @param {Record<string, unknown>} [props]
 * @param {...(Node | string | null | undefined)} children
 * @returns {HTMLElement}
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") {
      node.addEventListener(name, /** @type {EventListener} */ (value));
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  for (const child of children) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

/**
 * The page's element with an id, which must exist.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} [kind]
 * @returns {T}
 */
export function byId(id, kind) {
  const node = document.getElementById(id);
  if (!(node instanceof (kind ?? HTMLElement))) throw new Error(`the page has no ${id}`);
  return /** @type {T} */ (node);
}

/**
 * A number with `digits` decimals, with thousands separators.
 * @param {number} value
 * @param {number} [digits]
 */
export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/**
 * Seconds in a fitting unit.
 * @param {number} seconds
 */
export function duration(seconds) {
  if (seconds < 0.0995) return `${number(1000 * seconds, 1000 * seconds < 9.95 ? 1 : 0)} ms`;
  if (seconds < 9.95) return `${number(seconds, 2)} s`;
  return `${number(seconds, 0)} s`;
}

/**
 * A value in the browser's storage; null without storage.
 * @param {Storage | undefined} storage
 * @param {string} name
 * @returns {string | null}
 */
function stored(storage, name) {
  try {
    return storage?.getItem(name) ?? null;
  } catch {
    return null;
  }
}

/**
 * A store of values in the browser's storage, which may be missing, forbidden or full.
 * @param {() => Storage} open
 */
function keeper(open) {
  /** @type {Storage | undefined} */
  let storage;
  try {
    storage = open();
  } catch {
    storage = undefined;
  }
  return {
    /** @param {string} name */
    get: (name) => stored(storage, name),
    /** False: it is full, or forbidden. @param {string} name @param {string | null} value */
    set: (name, value) => {
      try {
        if (value === null) storage?.removeItem(name);
        else storage?.setItem(name, value);
        return true;
      } catch {
        return false;
      }
    },
  };
}

export const local = keeper(() => window.localStorage); // stays
export const session = keeper(() => window.sessionStorage); // ends with the tab
