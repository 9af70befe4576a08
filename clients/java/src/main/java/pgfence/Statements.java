package pgfence;

import pgfence.LeaseStates.Call;

import java.util.*;
import java.util.regex.*;
import java.util.stream.*;

/**
 * The statements of the client. The prefix {@code schema} is the extension's schema and a dot, or
 * empty if that is on the search_path; it replaces each {@code @}. Intervals are sent as texts that
 * mean the same with each IntervalStyle.
 */
record Statements(String schema) {
    /** A statement and its arguments. A list is sent as an array. */
    record Statement(String sql, Object... arguments) {}

    /** A table of row leases, written as in SQL, and the names of its columns. */
    record Table(String name, List<String> key, String fence, String deadline) {}

    /** The holder of a lease that was not granted, if it is visible. */
    private static final String TAKEN =
            """
             AS granted LEFT JOIN LATERAL (
                SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
                FROM unnest(?::text[]) AS n(name), @lease_info(n.name) AS i
                WHERE granted IS NULL
                    AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
                ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true""";

    /** Acquires one name. The wait is at most half of the role's timeouts, so that none ends it. */
    private static final String ACQUIRE =
            """
            SELECT granted, taken.* FROM @lease_acquire(?, ?, ?::interval,
                least(?::interval,
                    nullif(current_setting('statement_timeout'), '0')::interval / 2,
                    nullif(current_setting('lock_timeout'), '0')::interval / 2),
                ?::jsonb, ?, ?, ?, ?)"""
                    + TAKEN;

    private static final String ACQUIRE_ALL =
            "SELECT granted, taken.* FROM @lease_acquire_all(?, ?, ?::interval, ?::jsonb, ?)"
                    + TAKEN;
    private static final String OUTCOMES =
            """
            SELECT outcome, extract(epoch FROM remaining)::float8,
                extract(epoch FROM again_in)::float8, code FROM @""";
    private static final String PAIRS = "unnest(?::text[], ?::bigint[]) AS x(name, token)";

    /** Limits how long a release waits for a lock that another transaction holds. */
    private static final String SET_LOCK_TIMEOUT = " FROM set_config('lock_timeout', ?, true)";

    private static final String UNDO =
            "SELECT count(@lease_release(n.name, i.first_token))"
                    + SET_LOCK_TIMEOUT
                    + """
                    , unnest(?::text[]) AS n(name), @lease_info(n.name) AS i
                    WHERE i.holder = ? AND i.state = 'held'""";

    /** Guards the names in one order everywhere, so that transactions do not deadlock. */
    private static final String GUARD =
            "SELECT @lease_guard(x.name, x.token) FROM (SELECT * FROM "
                    + PAIRS
                    + " ORDER BY name COLLATE \"C\") AS x";

    /** Adopts the token for its holder in each transaction, and guards it. */
    private static final String GUARD_ADOPTED =
            "SELECT @lease_guard(x.name, (SELECT @lease_adopt(x.name, x.token, ?))) FROM " + PAIRS;

    /**
     * A setting that a guard makes, and that ends with its transaction. The session may have the
     * token before and after that.
     */
    private static final String SETTING = "'pg_fence_client.transaction'";

    /** Commits only the guard's transaction: otherwise the division fails. */
    static final String COMMIT =
            "SELECT 1 / count(*) WHERE current_setting(" + SETTING + ", true) = 'on'; COMMIT";

    private static final String TABLE_ARGS =
            "relation => ?::text::regclass, key_columns => ?::name[], fence_column => ?,"
                    + " deadline => ?";
    private static final String ROW_ARGS = TABLE_ARGS + ", keys => ?::text[]::jsonb[], tokens => ?";
    private static final String RELEASE_ROWS = "SELECT @lease_release_rows(" + ROW_ARGS + ")";
    private static final Pattern SPECIAL = Pattern.compile("[\"\\\\\\x00-\\x1f]");

    static String quoted(String name) {
        return '"' + name.replace("\"", "\"\"") + '"';
    }

    private Statement sql(String text, Object... arguments) {
        return new Statement(text.replace("@", schema), arguments);
    }

    private Statement sql(String text, Table table, Object... more) {
        Stream<?> first = Stream.of(table.name, table.key, table.fence, table.deadline);
        return sql(text, Stream.concat(first, Stream.of(more)).toArray());
    }

    private static String interval(long milliseconds) {
        return milliseconds + " milliseconds";
    }

    /** Tries to acquire a lease, or waits for it for one portion of the wait. */
    Statement acquire(Call call) {
        Options options = call.leases.get(0).options;
        List<String> names = call.names;
        String ttl = interval(options.ttl), wait = interval(call.wait);
        if (names.size() != 1) {
            return sql(
                    ACQUIRE_ALL, names, call.holder, ttl, options.metadata, options.session, names);
        }
        Object[] first = {names.get(0), call.holder, ttl, wait, options.metadata};
        Object[] more = {options.shared, options.slots, call.reclaim, options.session, names};
        return sql(ACQUIRE, Stream.of(first, more).flatMap(Stream::of).toArray());
    }

    Statement keep(Call call) {
        if (call.table instanceof Table table) {
            List<String> ttls = call.leases.stream().map(lease -> interval(lease.ttl)).toList();
            String rows =
                    OUTCOMES + "lease_keep_rows(" + ROW_ARGS + ", ttls => ?::text[]::interval[])";
            return sql(rows, table, call.names, call.tokens, ttls);
        }
        return sql(OUTCOMES + "lease_keep(?, ?)", call.names, call.tokens);
    }

    private static String lockTimeout(Call call) {
        return String.valueOf(Math.max(10, call.limit / 4));
    }

    Statement release(Call call) {
        String limit = lockTimeout(call);
        if (call.table instanceof Table table) {
            return sql(RELEASE_ROWS + SET_LOCK_TIMEOUT, table, call.names, call.tokens, limit);
        }
        String names = "SELECT @lease_release(x.name, x.token)" + SET_LOCK_TIMEOUT + ", " + PAIRS;
        return sql(names, limit, call.names, call.tokens);
    }

    /** Releases the names that the holder has. */
    Statement undo(Call call) {
        return sql(UNDO, lockTimeout(call), call.names, call.holder);
    }

    /** Adds the setting to a guard's statement. */
    static Statement withSetting(Statement guard) {
        String setting = ", set_config(" + SETTING + ", 'on', true)";
        return new Statement(guard.sql + setting, guard.arguments);
    }

    Statement guard(List<? extends Holding> leases) {
        return sql(GUARD, names(leases), tokens(leases));
    }

    /** Guards one adopted lease. */
    Statement guardAdopted(List<? extends Holding> leases) {
        return sql(GUARD_ADOPTED, leases.get(0).holder, names(leases), tokens(leases));
    }

    /** Releases leases as the last statement of a transaction. Returns the names that are lost. */
    Statement releaseGuarded(List<? extends Holding> leases) {
        String lost = " WHERE @lease_release(x.name, x.token) IS NULL";
        return sql("SELECT x.name FROM " + PAIRS + lost, names(leases), tokens(leases));
    }

    private static List<String> names(List<? extends Holding> leases) {
        return leases.stream().flatMap(lease -> lease.names().stream()).toList();
    }

    /** Returns the token of each name. */
    private static List<Long> tokens(List<? extends Holding> leases) {
        return leases.stream()
                .flatMap(lease -> lease.names().stream().map(name -> lease.token()))
                .toList();
    }

    // Row leases, whose names are a table and a row.

    /** Returns the name of a row: a JSON array of the values of its key, each as text. */
    static String rowName(Collection<?> key) {
        return key.stream()
                .map(Statements::text)
                .map(value -> SPECIAL.matcher(value).replaceAll(Statements::escaped))
                .collect(Collectors.joining("\",\"", "[\"", "\"]"));
    }

    /**
     * Returns a value as PostgreSQL reads it: bytes are hexadecimal digits. The text of a
     * java.util.Date has no milliseconds; the types of java.sql have texts in the form of SQL.
     */
    private static String text(Object value) {
        if (value.getClass() == Date.class) {
            return ((Date) value).toInstant().toString();
        }
        boolean isBinary = value instanceof byte[];
        return isBinary ? "\\x" + HexFormat.of().formatHex((byte[]) value) : value.toString();
    }

    private static String escaped(MatchResult found) {
        return "\\\\u%04x".formatted((int) found.group().charAt(0));
    }

    /** Guards a row lease. Returns the token, or NULL if the lease is lost. */
    Statement guardRow(Lease row) {
        String guard =
                "SELECT * FROM @lease_guard_row(" + TABLE_ARGS + ", key => ?::jsonb, token => ?)";
        return sql(guard, row.table, row.names().get(1), row.token());
    }

    /** Releases a row lease as the last write of a transaction. */
    Statement releaseGuardedRow(Lease row) {
        return sql(RELEASE_ROWS, row.table, List.of(row.names().get(1)), List.of(row.token()));
    }
}
