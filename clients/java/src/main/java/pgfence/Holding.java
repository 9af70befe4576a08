package pgfence;

import java.lang.System.Logger;
import java.sql.Connection;
import java.sql.SQLException;
import java.util.List;
import javax.sql.DataSource;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.Reason;

/** A lease that somebody holds, under a token that its transactions present: {@link Lease} or {@link Adopted}. */
public abstract sealed class Holding implements AutoCloseable permits Lease, Adopted {
    static final Logger LOG = System.getLogger("pgfence");

    final Fence fence;
    private final List<String> names;

    Holding(Fence fence, List<String> names) {
        this.fence = fence;
        this.names = names;
    }

    /** The names that it is a lease of. */
    public final List<String> names() {
        return names;
    }

    /** The token that its transactions present. */
    public abstract long token();

    /** Why the lease was lost; null where it was not. */
    public abstract LeaseLost loss();

    /**
     * A transaction during which nobody else is granted the lease, and whose writes present its token. It does not
     * begin when the lease is lost.
     *
     * @param connection of the work's own, to PostgreSQL
     */
    public final Guarded guard(Connection connection) {
        return new Guarded(List.of(this), connection, true, false);
    }

    /**
     * As {@link #guard}, without a lock: its writes present the token, and somebody else may be granted the lease
     * until one of them is to a bound table.
     *
     * @param connection of the work's own, to PostgreSQL
     */
    public final Guarded present(Connection connection) {
        return new Guarded(List.of(this), connection, false, false);
    }

    /**
     * The same data source, for code that knows nothing of fences: every transaction on its connections presents the
     * token, also one that is a single statement. They refuse to work once the lease is lost.
     *
     * @param source of connections to PostgreSQL
     * @return what the code is to use in its place
     */
    public final DataSource presenting(DataSource source) {
        return new Presenting(this, source);
    }

    /**
     * For a connection that presents the token from its beginning: the driver's property {@code options}. Not through a
     * pooler in transaction mode.
     *
     * @return {@code -c pg_fence.token=34}
     */
    public final String options() {
        return Fence.options(token());
    }

    /** Gives it back. */
    public abstract void release();

    /** Releases it, and throws LeaseLost after a loss; beside another exception of the block that is a suppressed one. */
    @Override
    public final void close() {
        release();
        if (loss() != null) {
            throw lost(null);
        }
    }

    /** The loss, to be thrown: a new one each time, for it keeps the trace of where it was made. */
    final LeaseLost lost(SQLException cause) {
        LeaseLost known = loss();
        if (known == null) {
            return new LeaseLost(Reason.RELEASED, names, cause);
        }
        return new LeaseLost(known.reason(), names, cause != null ? cause : (SQLException) known.getCause());
    }

    // For the transactions under it

    /** Presents the token until the transaction's end. */
    final void beginPresenting(Connection connection) throws SQLException {
        Sql.set(connection, "pg_fence.token", Long.toString(token()));
    }

    /** Begins to guard it. */
    abstract void beginGuarding(Connection connection) throws SQLException;

    /** Throws LeaseLost when it is known to be ours no more. */
    abstract void refuseIfOver();

    /** Whether a transaction was refused, so that the next one mends before it begins. */
    boolean isInDoubt() {
        return false;
    }

    /** Whether {@link #mend} may help where a transaction could not begin because of that. */
    abstract boolean canMend(Throwable error);

    /** Makes the token speak again, as after a failover; whether it does. */
    abstract boolean mend() throws SQLException;

    /** From here on a loss breaks that connection off. Throws LeaseLost. */
    void enter(Connection connection) {
        refuseIfOver();
    }

    void leave(Connection connection) {}

    /** The server refused a write: to be found out whether the lease is lost. */
    abstract void beatSoon();

    /** Waits for a renewal that is under way, and has no other begin: it would wait for the release. */
    void pause() {}

    void goOn() {}

    /** Releases it in a transaction of its holder's. Throws LeaseLost where it is gone. */
    abstract void releaseBy(Connection connection) throws SQLException;

    /** That transaction was committed. */
    abstract void hasBeenReleased();
}
