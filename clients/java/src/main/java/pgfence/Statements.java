package pgfence;

import pgfence.LeaseState.Call;

import java.util.*;
import java.util.regex.*;
import java.util.stream.*;

/**
 * The statements for the server, by the extension's schema, which is empty if that is on the
 * search_path.
 */
record Statements(String schema) {
    /** A statement and its arguments. */
    record Statement(String sql, Object... arguments) {}

    /** By whom it is taken, if that can be seen. */
    private static final String TAKEN =
            " AS granted LEFT JOIN LATERAL (SELECT i.holder,"
                    + " extract(epoch FROM i.remaining)::float8, i.state"
                    + " FROM unnest(?::text[]) AS n(name), @lease_info(n.name) AS i WHERE granted IS NULL"
                    + " AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)"
                    + " ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true";

    private static final String PAIRS = "unnest(?::text[], ?::bigint[]) AS x(name, token)";

    private Statement of(String sql, Object... arguments) {
        return new Statement(sql.replace("@", schema), arguments);
    }

    static String quoted(String name) {
        return '"' + name.replace("\"", "\"\"") + '"';
    }

    /** As text that is read alike, whatever the role's IntervalStyle. */
    private static String span(long milliseconds) {
        return milliseconds + " milliseconds";
    }

    /** One try, or a portion of a wait, which is below the role's timeouts, whatever these are. */
    Statement acquire(Call call, Options asked) {
        String[] names = call.names.toArray(String[]::new);
        if (names.length != 1) {
            return of(
                    "SELECT granted, taken.* FROM @lease_acquire_all(?::text[], ?, "
                            + "?::interval, ?::jsonb, ?)"
                            + TAKEN,
                    names,
                    call.holder,
                    span(asked.ttl),
                    asked.metadata,
                    asked.session,
                    names);
        }
        return of(
                "SELECT granted, taken.* FROM @lease_acquire(?, ?, ?::interval, "
                        + "least(?::interval,"
                        + " nullif(current_setting('statement_timeout'), '0')::interval / 2,"
                        + " nullif(current_setting('lock_timeout'), '0')::interval / 2), ?::jsonb, ?, "
                        + "?, ?, ?)"
                        + TAKEN,
                names[0],
                call.holder,
                span(asked.ttl),
                span(call.wait),
                asked.metadata,
                asked.shared,
                asked.slots,
                call.reclaim,
                asked.session,
                names);
    }

    Statement keep(Call call) {
        String kept =
                "SELECT outcome, extract(epoch FROM remaining)::float8,"
                        + " extract(epoch FROM again_in)::float8, code FROM ";
        if (call.table instanceof Table table) {
            String[] ttls = call.grants.stream().map(g -> span(g.ttl)).toArray(String[]::new);
            return ofRows(
                    kept
                            + "@lease_keep_rows(%s, ?::text[]::jsonb[], ?::bigint[],"
                            + " ?::text[]::interval[], ?, ?)",
                    table,
                    names(call),
                    tokens(call),
                    ttls);
        }
        return of(kept + "@lease_keep(?::text[], ?::bigint[])", names(call), tokens(call));
    }

    /** How long a release waits for the lock of somebody's open transaction. */
    private static String lockTimeout(Call call) {
        return String.valueOf(Math.max(10, call.limit / 4));
    }

    Statement release(Call call) {
        String from = " FROM set_config('lock_timeout', ?, true)";
        if (call.table instanceof Table table) {
            Statement rows = releaseRows(table, names(call), tokens(call));
            return new Statement(
                    rows.sql + from,
                    Stream.concat(Stream.of(rows.arguments), Stream.of(lockTimeout(call)))
                            .toArray());
        }
        return of(
                "SELECT @lease_release(x.name, x.token)" + from + ", " + PAIRS,
                lockTimeout(call),
                names(call),
                tokens(call));
    }

    /** Releases what a holder has of these names. */
    Statement undo(Call call) {
        return of(
                "SELECT count(@lease_release(n.name, i.first_token)) FROM "
                        + "set_config('lock_timeout', ?, true),"
                        + " unnest(?::text[]) AS n(name), @lease_info(n.name) AS i WHERE i.holder = ? "
                        + "AND i.state = 'held'",
                lockTimeout(call),
                names(call),
                call.holder);
    }

    /** In the same order everywhere, so that no two transactions wait for each other. */
    Statement guard(List<? extends Holding> some) {
        return of(
                "SELECT @lease_guard(x.name, x.token) FROM (SELECT * FROM "
                        + PAIRS
                        + " ORDER BY name COLLATE \"C\") AS x",
                names(some),
                tokens(some));
    }

    /** Each transaction makes the number known, and whose it is. */
    Statement guardAdopted(Holding one) {
        String name = one.names().get(0);
        return of(
                "SELECT @lease_guard(?, (SELECT @lease_adopt(?, ?, ?)))",
                name,
                name,
                one.token(),
                one.holder);
    }

    /** The last statement of a transaction: names under which there is nothing to be released. */
    Statement last(List<? extends Holding> some) {
        return of(
                "SELECT x.name FROM " + PAIRS + " WHERE @lease_release(x.name, x.token) IS NULL",
                names(some),
                tokens(some));
    }

    private static String[] names(Call call) {
        return call.names.toArray(String[]::new);
    }

    private static Long[] tokens(Call call) {
        return call.tokens.toArray(Long[]::new);
    }

    private static String[] names(List<? extends Holding> some) {
        return some.stream().flatMap(one -> one.names().stream()).toArray(String[]::new);
    }

    private static Long[] tokens(List<? extends Holding> some) {
        return some.stream()
                .flatMap(one -> one.names().stream().map(name -> one.token()))
                .toArray(Long[]::new);
    }

    // Leases in rows

    /** A table whose rows are leases of their own, as SQL has it; and the names of its columns. */
    record Table(String name, List<String> key, String fence, String deadline) {}

    /** The name of a row: a JSON array of the values of its key, each as text. */
    static String row(Collection<?> key) {
        return key.stream()
                .map(value -> SPECIAL.matcher(value.toString()).replaceAll(Statements::escaped))
                .collect(Collectors.joining("\",\"", "[\"", "\"]"));
    }

    private static final Pattern SPECIAL = Pattern.compile("[\"\\\\\\x00-\\x1f]");

    private static String escaped(MatchResult found) {
        return "\\\\u%04x".formatted((int) found.group().charAt(0));
    }

    /** The first two arguments are the table's, and the last two. */
    private Statement ofRows(String sql, Table table, Object... arguments) {
        Stream<?> of = Stream.of(table.name, table.key.toArray(String[]::new));
        Stream<?> columns = Stream.of(table.fence, table.deadline);
        return of(
                sql.formatted("?::text::regclass, ?::name[]"),
                Stream.of(of, Stream.of(arguments), columns).flatMap(one -> one).toArray());
    }

    /** Its answer is the token, or NULL. */
    Statement guardRow(Lease row) {
        return ofRows(
                "SELECT @lease_guard_row(%s, ?::jsonb, ?, ?, ?)",
                row.table, row.names().get(1), row.token());
    }

    /** The last write of a transaction, which gives the row up. */
    Statement lastOfRow(Lease row) {
        return releaseRows(row.table, new String[] {row.names().get(1)}, new Long[] {row.token()});
    }

    private Statement releaseRows(Table table, String[] keys, Long[] tokens) {
        return ofRows(
                "SELECT @lease_release_rows(%s, ?::text[]::jsonb[], ?::bigint[], ?, ?)",
                table, keys, tokens);
    }
}
