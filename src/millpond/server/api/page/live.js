// Live statistics: polled every two seconds, and not while the page is hidden.

import { ApiError, call } from "./api.js";

const EVERY = 2000;
const SLOWEST = 30000;

export class Live {
  #timer = null;
  #asking = false;
  #wanted = false;
  #wait = EVERY;

  /** `heard` is called with each sample, `lost` with each error. */
  constructor({ heard, lost }) {
    this.heard = heard;
    this.lost = lost;
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  start() {
    this.#wanted = true;
    this.#schedule(0);
  }

  stop() {
    this.#wanted = false;
    clearTimeout(this.#timer);
  }

  #schedule(wait) {
    clearTimeout(this.#timer);
    if (this.#wanted && !document.hidden && !this.#asking) this.#timer = setTimeout(() => this.#ask(), wait);
  }

  async #ask() {
    this.#asking = true;
    try {
      const { content } = await call("stats");
      this.heard(content);
      this.#wait = EVERY;
    } catch (error) {
      this.#wait = Math.min(this.#wait * 2, SLOWEST); // back off, so that a restarting server is not flooded
      this.lost(error instanceof ApiError ? error : new ApiError(String(error)));
    } finally {
      this.#asking = false;
      this.#schedule(this.#wait);
    }
  }
}
