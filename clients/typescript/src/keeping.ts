import type { Reason } from "./errors.js";
import { now } from "./span.js";

/** The answer of `lease_keep` for one name; times are in milliseconds. */
export type Answer = Readonly<{ outcome: string; remaining: number; againIn: number | undefined }>;
/** The outcomes that tell a loss, and its reason. */
const LOSSES: Readonly<Record<string, Reason>> = { lost: "gone", refused: "refused" };

/** When a lease is renewed and when it is over: decisions from times and answers alone, on the clock of `now`. */
export class Keeping {
  deadline: number;
  beatAt: number;
  /** Transactions that are about to release it: it is not renewed meanwhile. */
  resting = 0;

  /** By a call that began then, from where the ttl counts. */
  constructor(before: number, readonly ttl: number) {
    this.deadline = before + ttl;
    this.beatAt = before + ttl / 3;
  }

  /** Takes the answers, one for each name, to a call that began at `before`; `gotOn`: it has kept something. Returns why the
   * lease is lost, if it is. */
  answered(answers: readonly Answer[], before: number, gotOn: boolean): Reason | undefined {
    const loss = answers.map(({ outcome }) => LOSSES[outcome]).find((reason) => reason !== undefined);
    if (loss !== undefined) return this.resting > 0 ? undefined : loss;
    const againIn = Math.min(...answers.map((answer) => answer.againIn ?? this.ttl / 12));
    // Out of locks: at once, in another transaction, as long as that helps.
    this.beatAt = now() + (gotOn || againIn > 0 ? againIn : this.ttl / 12);
    if (answers.every(({ outcome }) => outcome === "kept")) {
      this.deadline = before + Math.min(...answers.map(({ remaining }) => remaining));
      this.beatAt = before + againIn;
    }
    return undefined;
  }

  failed(smallest: number): void { this.beatAt = now() + smallest / 12; }
  get dueAt(): number { return this.resting > 0 ? Infinity : this.beatAt; }
}
