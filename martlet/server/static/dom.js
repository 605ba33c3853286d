// @ts-check
/** Elements are made here, of text and attributes: nothing in these pages is ever parsed as HTML. */

/**
 * Make an element. Of `props`, functions are event handlers, true is an empty attribute, false and null are none.
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
 * The element of an id, which the page has.
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
 * A number with as many digits as a person wants.
 * @param {number} value
 * @param {number} [digits]
 */
export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/**
 * Seconds, in the unit that fits.
 * @param {number} seconds
 */
export function duration(seconds) {
  if (seconds < 0.0995) return `${number(1000 * seconds, 1000 * seconds < 9.95 ? 1 : 0)} ms`;
  if (seconds < 9.95) return `${number(seconds, 2)} s`;
  return `${number(seconds, 0)} s`;
}

/**
 * A choice in the browser's storage, or nothing where there is no storage.
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
 * Storage that may be missing or full: what it cannot keep is lost when the page is closed.
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
