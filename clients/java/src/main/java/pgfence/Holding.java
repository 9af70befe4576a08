package pgfence;

import java.lang.System.Logger;
import java.sql.Connection;
import java.sql.SQLException;
import java.util.List;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.Reason;

/** A lease that somebody holds, under a token that its transactions present: {@link Lease} or {@link Adopted}. */
public abstract class Holding implements AutoCloseable {
    static final Logger LOG = System.getLogger("pgfence");

    final Fence fence;
    private final List<String> names;
    volatile long token;
    volatile LeaseLost loss;

    Holding(Fence fence, List<String> names) {
        this.fence = fence;
        this.names = names;
    }

    /** Those that it is a lease of. */
    public final List<String> names() {
        return names;
    }

    /** The token that its transactions present; it serves for as long as the lease is held. */
    public final long token() {
        return token;
    }

    /** Why the lease was lost, or null. */
    public final LeaseLost loss() {
        return loss;
    }

    /**
     * A transaction during which nobody else is granted the lease, and whose writes present its token. It does not
     * begin when the lease is lost.
     */
    public final Guarded guard(Connection connection) {
        return new Guarded(this, connection, true, false);
    }

    /**
     * As {@link #guard}, without a lock: its writes present the token, and somebody else may be granted the lease
     * until one of them is to a bound table.
     */
    public final Guarded present(Connection connection) {
        return new Guarded(this, connection, false, false);
    }

    /** Gives it back. */
    public abstract void release();

    /** Releases it, and throws LeaseLost after a loss; beside another exception of the block that is a suppressed one. */
    @Override
    public final void close() {
        release();
        if (loss != null) {
            throw lost(null);
        }
    }

    /** The loss, to be thrown: a new one each time, for it keeps the trace of where it was made. */
    final LeaseLost lost(SQLException cause) {
        LeaseLost known = loss;
        if (known == null) {
            return new LeaseLost(Reason.RELEASED, names, cause);
        }
        return new LeaseLost(known.reason(), names, cause != null ? cause : (SQLException) known.getCause());
    }

    /** Tells a loss, once. */
    abstract void lose(Reason reason, SQLException cause);

    // Its SQL

    final String onNames(String function) {
        return fence.select(function + (names.size() > 1 ? "_all" : "") + "(?, ?)");
    }

    final Object name() {
        return names.size() > 1 ? names.toArray(String[]::new) : names.get(0);
    }

    // For the transactions under it

    /** Begins what a transaction is under: a guard, or the token alone. */
    final void begin(Connection connection, boolean guards) throws SQLException {
        if (!guards) {
            Sql.set(connection, "pg_fence.token", Long.toString(token));
            return;
        }
        for (String name : names.stream().sorted().toList()) {
            guardOne(connection, name);
        }
    }

    void guardOne(Connection connection, String name) throws SQLException {
        Sql.value(connection, fence.select("lease_guard(?, ?)"), name, token);
    }

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

    /** Releases it in a transaction of its holder's. */
    final void releaseBy(Connection connection) throws SQLException {
        if (Sql.value(connection, onNames("lease_release"), name(), token) == null) {
            lose(Reason.GONE, null);
            refuseIfOver();
        }
    }

    /** That transaction was committed. */
    abstract void hasBeenReleased();
}
