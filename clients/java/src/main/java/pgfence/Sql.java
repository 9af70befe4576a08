package pgfence;

import java.sql.*;
import java.util.*;
import org.postgresql.PGStatement;

/** The statements for the server. {@code @} stands for the extension's schema, where that is named. */
final class Sql {
    /** A statement and its arguments. */
    record Call(String sql, Object... arguments) {}

    /** By whom, where that can be seen. */
    private static final String TAKEN_BY = " AS granted LEFT JOIN LATERAL (SELECT i.holder, extract(epoch FROM i.remaining)::float8"
            + " FROM unnest(?::text[]) AS n(name), @lease_info(n.name) AS i WHERE granted IS NULL"
            + " AND i.state IN ('held', 'uncommitted') ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true";
    /** The wait is below the role's timeouts, whatever these are. */
    static final String ACQUIRE = "SELECT granted, taken.* FROM @lease_acquire(?, ?, ?::interval, least(?::interval,"
            + " nullif(current_setting('statement_timeout'), '0')::interval / 2,"
            + " nullif(current_setting('lock_timeout'), '0')::interval / 2), ?::jsonb, ?, ?, ?, ?)" + TAKEN_BY;
    static final String ACQUIRE_ALL = "SELECT granted, taken.* FROM @lease_acquire_all(?::text[], ?, ?::interval, ?::jsonb, ?)"
            + TAKEN_BY;
    static final String KEEP = "SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8"
            + " FROM @lease_keep(?::text[], ?::bigint[])";
    private static final String PAIRS = "unnest(?::text[], ?::bigint[]) AS x(name, token)";
    static final String RELEASE = "SELECT @lease_release(x.name, x.token) FROM " + PAIRS;
    /** In a transaction of its own, which does not wait for ever for somebody else's. */
    static final String RELEASE_ASIDE = RELEASE + ", set_config('lock_timeout', ?, true)";
    /** In the same order everywhere, so that no two wait for each other. */
    static final String GUARD = "SELECT @lease_guard(x.name, x.token) FROM (SELECT * FROM " + PAIRS
            + " ORDER BY name COLLATE \"C\") AS x";
    /** Each transaction makes the number known, and whose it is. */
    static final String GUARD_ADOPTED = "SELECT @lease_guard(?, (SELECT @lease_adopt(?, ?, ?)))";

    /** As text, whatever the role's IntervalStyle. */
    static String span(double seconds) { return Math.round(seconds * 1e6) + " microseconds"; }

    static String[] names(List<? extends Holding> some) {
        return some.stream().flatMap(one -> one.names().stream()).toArray(String[]::new);
    }

    /** One for each name. */
    static Long[] tokens(List<? extends Holding> some) {
        return some.stream().flatMap(one -> one.names().stream().map(name -> one.token())).toArray(Long[]::new);
    }

    /** The pairs of which a name had nothing to be released. */
    static <H extends Holding> List<H> gone(List<H> released, List<Object[]> answers) {
        Iterator<Object[]> each = answers.iterator();
        return released.stream().filter(one -> one.names().stream().filter(name -> each.next()[0] == null).count() > 0).toList();
    }

    /** On connections of ours nothing is prepared, for behind a pooler the next transaction is another server's. */
    static List<Object[]> rows(Connection on, Call call, boolean isOurs) throws SQLException {
        try (PreparedStatement statement = on.prepareStatement(call.sql)) {
            if (isOurs && statement.isWrapperFor(PGStatement.class)) {
                statement.unwrap(PGStatement.class).setPrepareThreshold(0);
            }
            for (int at = 0; at < call.arguments.length; at++) { statement.setObject(at + 1, call.arguments[at]); }
            List<Object[]> rows = new ArrayList<>();
            try (ResultSet read = statement.executeQuery()) {
                Object[] row = new Object[read.getMetaData().getColumnCount()];
                for (; read.next(); rows.add(row.clone())) {
                    for (int at = 0; at < row.length; at++) { row[at] = read.getObject(at + 1); }
                }
            }
            return rows;
        }
    }
}
