package pgfence;

import pgfence.LeaseState.Call;

import java.sql.*;
import java.util.*;
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
        return of(
                "SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM "
                        + "again_in)::float8, code"
                        + " FROM @lease_keep(?::text[], ?::bigint[])",
                names(call),
                tokens(call));
    }

    /** How long a release waits for the lock of somebody's open transaction. */
    private static String lockTimeout(Call call) {
        return String.valueOf(Math.max(10, call.limit / 4));
    }

    Statement release(Call call) {
        return of(
                "SELECT @lease_release(x.name, x.token) IS NOT NULL FROM "
                        + "set_config('lock_timeout', ?, true), "
                        + PAIRS,
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

    /** A table whose rows are leases of their own; all names are quoted. */
    record Table(
            String name,
            String fence,
            String deadline,
            List<String> keys,
            List<String> types,
            boolean isManaged) {
        static Statement describe(String table) {
            String columns =
                    " FROM pg_index AS i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, at), "
                            + "pg_attribute AS a"
                            + " WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid AND "
                            + "a.attnum = k.attnum"
                            + " ORDER BY k.at)";
            return new Statement(
                    "SELECT DISTINCT format('%I.%I', n.nspname, c.relname), t.tgargs,"
                            + " ARRAY(SELECT a.attname::text"
                            + columns
                            + ","
                            + " ARRAY(SELECT format_type(a.atttypid, a.atttypmod)"
                            + columns
                            + " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
                            + " JOIN pg_trigger AS t ON t.tgrelid = c.oid AND t.tgnargs > 3"
                            + " JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proname = 'fenced'"
                            + " WHERE c.oid = ?::text::regclass",
                    table);
        }

        /**
         * Reads what that has found: the trigger's arguments are the fence, its mode, a lease, the
         * deadline.
         */
        static Table described(String table, List<Object[]> rows) {
            for (Object[] row : rows) {
                String[] parts =
                        new String((byte[]) row[1], java.nio.charset.StandardCharsets.UTF_8)
                                .split("\0", -1);
                List<String> keys = Stream.of((String[]) row[2]).map(Statements::quoted).toList();
                if (!parts[3].isEmpty() && !keys.isEmpty()) {
                    return new Table(
                            (String) row[0],
                            quoted(parts[0]),
                            quoted(parts[3]),
                            keys,
                            List.of((String[]) row[3]),
                            parts[1].equals("managed"));
                }
            }
            throw new IllegalArgumentException(
                    "the rows of "
                            + table
                            + " are no leases of their own, or it has no primary"
                            + " key: fence_protect(…, deadline => …)");
        }

        /** The values of the primary key, in the order of its columns, as an array's text. */
        String key(Object value) {
            List<?> values =
                    value instanceof List<?> several ? several : Collections.singletonList(value);
            if (values.size() != keys.size() || values.contains(null)) {
                throw new IllegalArgumentException(
                        "the key of " + name + " has " + keys.size() + " columns, without null");
            }
            return values.stream()
                    .map(one -> '"' + one.toString().replaceAll("[\"\\\\]", "\\\\$0") + '"')
                    .collect(Collectors.joining(",", "{", "}"));
        }

        /**
         * The rows that are asked for. A setting shows a managed table the token, and a guard its
         * own transaction.
         */
        private Statement of(Call call, boolean setsToken, String sql, Object... more) {
            Long[] ttls = call.grants.stream().map(grant -> grant.ttl).toArray(Long[]::new);
            return of(names(call), tokens(call), ttls, setsToken, sql, more);
        }

        private Statement of(
                String[] rows,
                Long[] tokens,
                Long[] ttls,
                boolean setsToken,
                String sql,
                Object... more) {
            String columns =
                    IntStream.range(0, keys.size())
                            .mapToObj(
                                    i ->
                                            ", (key::text[])[%d]::%s AS k%d"
                                                    .formatted(i + 1, types.get(i), i))
                            .collect(Collectors.joining());
            String asked =
                    "WITH asked AS MATERIALIZED (SELECT n, token, ttl * interval '1 "
                            + "millisecond' AS ttl"
                            + columns
                            + (setsToken ? ", set_config('pg_fence.token', token::text, true)" : "")
                            + " FROM unnest(?::text[], ?::bigint[], ?::bigint[]) WITH ORDINALITY AS "
                            + "x(key, token, ttl, n))";
            Object[] arguments =
                    Stream.concat(Stream.of(rows, tokens, ttls), Stream.of(more)).toArray();
            return new Statement(asked + sql, arguments);
        }

        private String is(String asked) {
            return "r."
                    + fence
                    + " = "
                    + asked
                    + ".token"
                    + IntStream.range(0, keys.size())
                            .mapToObj(i -> " AND r." + keys.get(i) + " = " + asked + ".k" + i)
                            .collect(Collectors.joining());
        }

        /** Waits for no lock, and renews what is not over. */
        Statement keep(Call call) {
            return of(
                    call,
                    isManaged,
                    ", free AS MATERIALIZED (SELECT asked.* FROM asked JOIN "
                            + name
                            + " AS r ON "
                            + is("asked")
                            + " WHERE r."
                            + deadline
                            + " > clock_timestamp() FOR UPDATE OF r SKIP LOCKED)"
                            + " UPDATE "
                            + name
                            + " AS r SET "
                            + deadline
                            + " = clock_timestamp() + free.ttl, "
                            + fence
                            + " = free.token FROM free WHERE "
                            + is("free")
                            + " RETURNING free.n, extract(epoch FROM r."
                            + deadline
                            + " - clock_timestamp())::float8");
        }

        /**
         * Tells without a lock which rows have their token still, and whether they were given up.
         */
        Statement look(Call call) {
            return of(
                    call,
                    false,
                    " SELECT asked.n, r."
                            + deadline
                            + " IS NULL FROM asked JOIN "
                            + name
                            + " AS r ON "
                            + is("asked"));
        }

        /**
         * The guard of a row, or its last write, which gives it up; returns a row if there was one.
         */
        Statement touch(String key, long token, boolean givesUp) {
            String set = fence + " = asked.token" + (givesUp ? ", " + deadline + " = NULL" : "");
            return of(
                    new String[] {key},
                    new Long[] {token},
                    new Long[] {0L},
                    true,
                    " UPDATE "
                            + name
                            + " AS r SET "
                            + set
                            + " FROM asked WHERE "
                            + is("asked")
                            + " AND r."
                            + deadline
                            + " IS NOT NULL RETURNING 1");
        }

        Statement release(Call call) {
            return of(
                    call,
                    isManaged,
                    ", given_up AS (UPDATE "
                            + name
                            + " AS r SET "
                            + fence
                            + " = asked.token, "
                            + deadline
                            + " = NULL FROM asked, set_config('lock_timeout', ?, true) WHERE "
                            + is("asked")
                            + " AND r."
                            + deadline
                            + " IS NOT NULL RETURNING asked.n)"
                            + " SELECT EXISTS (SELECT FROM given_up WHERE given_up.n = asked.n) FROM "
                            + "asked ORDER BY asked.n",
                    lockTimeout(call));
        }
    }
}
