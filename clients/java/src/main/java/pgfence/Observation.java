package pgfence;

import java.lang.System.Logger.Level;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.OffsetDateTime;
import java.util.Optional;
import java.util.function.Consumer;

/**
 * Tells who has a lease, by looking each second: {@link Fence#observe}. It looks by the connection that keeps the leases
 * of its fence.
 */
public final class Observation implements AutoCloseable {
    private final Fence fence;
    private final String name;
    private final Consumer<Optional<Leader>> tell;
    private final Teller teller = new Teller();
    /** When to look; the keeper's. */
    long next;
    private Optional<Leader> last;

    Observation(Fence fence, String name, Consumer<Optional<Leader>> tell) {
        this.fence = fence;
        this.name = name;
        this.tell = tell;
        next = Clock.now();
        fence.keeper().observe(this);
    }

    /** One look. Where the server cannot be reached nothing is known, and nothing told. */
    void look(OwnConnection own, long limit) {
        String sql = "SELECT coalesce(holder, ''), first_token, acquired_at FROM " + fence.named("lease_info(?)")
                + " WHERE state = 'held' ORDER BY first_token LIMIT 1";
        try {
            Optional<Leader> now = own.transaction(limit, limit, on -> {
                try (PreparedStatement statement = Sql.prepare(on, sql, name); ResultSet rows = statement.executeQuery()) {
                    return rows.next() ? Optional.of(leader(rows)) : Optional.empty();
                }
            });
            boolean isSame = last != null && now.map(Leader::token).equals(last.map(Leader::token));
            last = now;
            if (!isSame) {
                teller.tell(() -> tell.accept(now));
            }
        } catch (SQLException error) {
            Holding.LOG.log(Level.WARNING, "who has the lease {0} is not known: {1}", name, error.getMessage());
        }
    }

    private static Leader leader(ResultSet rows) throws SQLException {
        OffsetDateTime since = rows.getObject(3, OffsetDateTime.class);
        return new Leader(rows.getString(1), rows.getLong(2), since.toInstant());
    }

    /** Looks no more. */
    @Override
    public void close() {
        fence.keeper().endObserving(this);
    }
}
