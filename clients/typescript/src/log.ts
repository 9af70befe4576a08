import { debuglog } from "node:util";

/** NODE_DEBUG=pg_fence shows it. */
export const log = debuglog("pg_fence");
