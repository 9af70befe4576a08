package pgfence;

import pgfence.LeaseState.Call;

import java.util.*;
import java.util.regex.*;
import java.util.stream.*;

/**
 * The statements for the server, by the extension's schema, which is empty if that is on the
 * search_path. Spans of time are texts that are read alike, whatever the role's IntervalStyle.
 */
record Statements(String schema) {
    /** A statement and its arguments, of which a list is an array. */
    record Statement(String sql, Object... arguments) {}

    /** A table whose rows are leases of their own, as SQL has it; and the names of its columns. */
    record Table(String name, List<String> key, String fence, String deadline) {}

    /** By whom it is taken, if that can be seen. */
    private static final String TAKEN =
            """
             AS granted LEFT JOIN LATERAL (
                SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
                FROM unnest(?::text[]) AS n(name), @lease_info(n.name) AS i
                WHERE granted IS NULL
                    AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
                ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true""";

    /** A wait is below the role's timeouts, whatever these are. */
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
    private static final String KEPT =
            """
            SELECT outcome, extract(epoch FROM remaining)::float8,
                extract(epoch FROM again_in)::float8, code FROM @""";
    private static final String PAIRS = "unnest(?::text[], ?::bigint[]) AS x(name, token)";

    /** How long a release waits for the lock of somebody's open transaction. */
    private static final String FOR_NO_LONGER = " FROM set_config('lock_timeout', ?, true)";

    private static final String UNDO =
            "SELECT count(@lease_release(n.name, i.first_token))"
                    + FOR_NO_LONGER
                    + """
                    , unnest(?::text[]) AS n(name), @lease_info(n.name) AS i
                    WHERE i.holder = ? AND i.state = 'held'""";

    /** In the same order everywhere, so that no two transactions wait for each other. */
    private static final String GUARD =
            "SELECT @lease_guard(x.name, x.token) FROM (SELECT * FROM "
                    + PAIRS
                    + " ORDER BY name COLLATE \"C\") AS x";

    /** Each transaction makes the number known, and whose it is. */
    private static final String GUARD_ADOPTED =
            "SELECT @lease_guard(x.name, (SELECT @lease_adopt(x.name, x.token, ?))) FROM " + PAIRS;

    private static final String OF_TABLE =
            "relation => ?::text::regclass, key_columns => ?::name[], fence_column => ?,"
                    + " deadline => ?";
    private static final String ROWS = OF_TABLE + ", keys => ?::text[]::jsonb[], tokens => ?";
    private static final String RELEASE_ROWS = "SELECT @lease_release_rows(" + ROWS + ")";
    private static final Pattern SPECIAL = Pattern.compile("[\"\\\\\\x00-\\x1f]");

    static String quoted(String name) {
        return '"' + name.replace("\"", "\"\"") + '"';
    }

    private Statement of(String sql, Object... arguments) {
        return new Statement(sql.replace("@", schema), arguments);
    }

    private Statement of(String sql, Table table, Object... more) {
        Stream<?> first = Stream.of(table.name, table.key, table.fence, table.deadline);
        return of(sql, Stream.concat(first, Stream.of(more)).toArray());
    }

    private static String span(long milliseconds) {
        return milliseconds + " milliseconds";
    }

    /** One try, or a portion of a wait. */
    Statement acquire(Call call) {
        Options o = call.grants.get(0).options;
        List<String> names = call.names;
        String ttl = span(o.ttl), wait = span(call.wait);
        if (names.size() != 1) {
            return of(ACQUIRE_ALL, names, call.holder, ttl, o.metadata, o.session, names);
        }
        Object[] first = {names.get(0), call.holder, ttl, wait, o.metadata};
        Object[] then = {o.shared, o.slots, call.reclaim, o.session, names};
        return of(ACQUIRE, Stream.of(first, then).flatMap(Stream::of).toArray());
    }

    Statement keep(Call call) {
        if (call.table instanceof Table table) {
            List<String> ttls = call.grants.stream().map(grant -> span(grant.ttl)).toList();
            String rows = KEPT + "lease_keep_rows(" + ROWS + ", ttls => ?::text[]::interval[])";
            return of(rows, table, call.names, call.tokens, ttls);
        }
        return of(KEPT + "lease_keep(?, ?)", call.names, call.tokens);
    }

    private static String lockTimeout(Call call) {
        return String.valueOf(Math.max(10, call.limit / 4));
    }

    Statement release(Call call) {
        String limit = lockTimeout(call);
        if (call.table instanceof Table table) {
            return of(RELEASE_ROWS + FOR_NO_LONGER, table, call.names, call.tokens, limit);
        }
        String names = "SELECT @lease_release(x.name, x.token)" + FOR_NO_LONGER + ", " + PAIRS;
        return of(names, limit, call.names, call.tokens);
    }

    /** Releases what a holder has of these names. */
    Statement undo(Call call) {
        return of(UNDO, lockTimeout(call), call.names, call.holder);
    }

    Statement guard(List<? extends Holding> some) {
        return of(GUARD, names(some), tokens(some));
    }

    Statement guardAdopted(List<? extends Holding> one) {
        return of(GUARD_ADOPTED, one.get(0).holder, names(one), tokens(one));
    }

    /** The last statement of a transaction: names under which there is nothing to be released. */
    Statement last(List<? extends Holding> some) {
        String gone = " WHERE @lease_release(x.name, x.token) IS NULL";
        return of("SELECT x.name FROM " + PAIRS + gone, names(some), tokens(some));
    }

    private static List<String> names(List<? extends Holding> some) {
        return some.stream().flatMap(one -> one.names().stream()).toList();
    }

    private static List<Long> tokens(List<? extends Holding> some) {
        return some.stream().flatMap(one -> one.names().stream().map(name -> one.token())).toList();
    }

    // Leases in rows, whose names are a table and a row

    /** The name of a row: a JSON array of the values of its key, each as text. */
    static String row(Collection<?> key) {
        return key.stream()
                .map(Statements::text)
                .map(value -> SPECIAL.matcher(value).replaceAll(Statements::escaped))
                .collect(Collectors.joining("\",\"", "[\"", "\"]"));
    }

    private static String text(Object value) {
        boolean isBinary = value instanceof byte[];
        return isBinary ? "\\x" + HexFormat.of().formatHex((byte[]) value) : value.toString();
    }

    private static String escaped(MatchResult found) {
        return "\\\\u%04x".formatted((int) found.group().charAt(0));
    }

    /** Its answer is the token, or NULL. */
    Statement guardRow(Lease row) {
        String guard = "SELECT @lease_guard_row(" + OF_TABLE + ", key => ?::jsonb, token => ?)";
        return of(guard, row.table, row.names().get(1), row.token());
    }

    /** The last write of a transaction, which gives the row up. */
    Statement lastOfRow(Lease row) {
        return of(RELEASE_ROWS, row.table, List.of(row.names().get(1)), List.of(row.token()));
    }
}
