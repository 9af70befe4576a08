package pgfence;

import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.ResultSetMetaData;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * How the first free rows of a query are claimed, each with a lease of its own:
 * {@code fence.claim("SELECT 'job:' || id, * FROM jobs WHERE done IS NULL ORDER BY id").acquire(10)}.
 */
public final class ClaimRequest extends LeaseTerms<ClaimRequest> {
    private final String query;
    private final Object[] parameters;

    ClaimRequest(Fence fence, String query, Object[] parameters) {
        super(fence);
        this.query = query;
        this.parameters = parameters;
    }

    /** A grant. */
    private record Claimed(String name, Map<String, Object> row, long token) {}

    /**
     * Takes the leases of the first rows, in the order of the query, whose leases are free; by one statement, which is
     * over within a third of the ttl.
     *
     * @param count how many at most
     * @return as many as were free; each has its {@link Lease#row}
     * @throws SQLException where the server refuses, or cannot be reached
     * @throws InterruptedException if interrupted; what was taken all the same is given back
     */
    public List<Lease> acquire(int count) throws SQLException, InterruptedException {
        if (count < 1) {
            throw new IllegalArgumentException("a claim is of at least one row");
        }
        List<Lease> leases = new ArrayList<>();
        long limit = Clock.nanos(ttl) / 3;
        Separate<Void> call = new Separate<>(fence, (own, self) -> {
            long before = Clock.now();
            List<Claimed> claimed = own.transaction(limit, limit, on -> claim(on, count));
            List<Kept> kept = new ArrayList<>();
            for (Claimed one : claimed) {
                Kept lease = new Kept(List.of(one.name()), this);
                lease.token = one.token();
                leases.add(new Lease(fence, lease, one.row()));
                kept.add(lease);
            }
            Keeper keeper = fence.keeper();
            if (!self.deliver(() -> kept.forEach(lease -> keeper.keep(lease, before, lease.token, null)))) {
                kept.forEach(lease -> keeper.giveBackUnwanted(own, lease, limit));
            }
            return null;
        });
        fence.told("claim", List.of(), call::get);
        return leases;
    }

    private List<Claimed> claim(Connection on, int count) throws SQLException {
        // The inner query's order is kept: rows are taken from it one by one, until there are enough.
        String acquire = "lease_acquire(c.pg_fence_lease::text, ?, ?::interval, NULL, ?::jsonb, ?, ?)";
        String sql = "SELECT c.*, t.token FROM (" + query + ") AS c(pg_fence_lease), LATERAL " + fence.named(acquire)
                + " AS t(token) WHERE t.token IS NOT NULL LIMIT ?";
        List<Object> arguments = new ArrayList<>(Arrays.asList(parameters));
        arguments.addAll(Arrays.asList(holder == null ? Attempt.uniqueHolder() : holder, Sql.interval(ttl), metadata,
                shared, slots, count));
        List<Claimed> claimed = new ArrayList<>();
        try (PreparedStatement statement = Sql.prepare(on, sql, arguments.toArray());
                ResultSet rows = statement.executeQuery()) {
            ResultSetMetaData columns = rows.getMetaData();
            int last = columns.getColumnCount();
            while (rows.next()) {
                Map<String, Object> row = new LinkedHashMap<>();
                for (int column = 2; column < last; column++) {
                    row.put(columns.getColumnLabel(column), rows.getObject(column));
                }
                claimed.add(new Claimed(rows.getString(1), Collections.unmodifiableMap(row), rows.getLong(last)));
            }
        }
        return claimed;
    }
}
