package pgfence;

import java.lang.ref.WeakReference;
import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.Reason;

/**
 * A lease that is kept until it is closed or lost. {@link LeaseRequest} acquires it; use it in a try-with-resources
 * statement. One that is forgotten, so that nothing refers to it any more, is renewed no more.
 */
public final class Lease extends Holding {
    private final Keeper keeper;
    private final Kept kept;
    private final Map<String, Object> row;

    Lease(Fence fence, Kept kept, Map<String, Object> row) {
        super(fence, kept.names);
        this.keeper = fence.keeper();
        this.kept = kept;
        this.row = row;
        kept.handle = new WeakReference<>(this);
    }

    /** The token of the acquire, which its transactions present; it serves for as long as the lease is held. */
    @Override
    public long token() {
        return kept.token;
    }

    @Override
    public LeaseLost loss() {
        return kept.loss;
    }

    /**
     * The row of the query that it was claimed for, by the names of its columns, without the first, which is the name
     * of the lease. Empty where it was not claimed.
     */
    public Map<String, Object> row() {
        return row;
    }

    /** Whether it is ours at this moment, by our own clock; not where a release is under way. */
    public boolean isHeld() {
        return !remaining().isZero();
    }

    /** How long it is ours if no renewal comes through any more; zero where it is not held. */
    public Duration remaining() {
        return Duration.ofNanos(keeper.remaining(kept));
    }

    /**
     * For long steps between transactions, and before each call to the outside. Throws LeaseLost when it is ours no
     * more.
     */
    public void check() {
        if (!isHeld()) {
            keeper.lose(kept, Reason.DEADLINE, null);
            throw lost(null);
        }
    }

    /** Sleeps; throws LeaseLost as soon as the lease is lost. */
    public void sleep(Duration span) throws InterruptedException {
        keeper.sleep(kept, Clock.nanos(span));
        check();
    }

    /**
     * Has it renewed at once. Throws LeaseLost.
     *
     * @return the new token, which a {@code strict} table asks for when a row is written again; empty when the renewal
     *     failed, which is no loss yet
     */
    public OptionalLong renew() {
        check();
        Long token = keeper.renew(kept);
        check();
        return token == null ? OptionalLong.empty() : OptionalLong.of(token);
    }

    /** Gives it back. No error where that fails: then it ends at its ttl. */
    @Override
    public void release() {
        keeper.release(kept);
    }

    /**
     * Stops keeping it, without a release: for another process, which goes on with it by
     * {@link LeaseRequest#resume}. It has as long for that as is left of the ttl.
     *
     * @return its token, to be handed over
     * @throws LeaseLost when it is ours no more
     */
    public long detach() {
        check();
        if (keeper.isBoundToSession(kept)) {
            throw new IllegalStateException("a session lease ends with its session, so it cannot be handed over");
        }
        keeper.forget(kept);
        return token();
    }

    // For the transactions under it

    @Override
    void beginGuarding(Connection connection) throws SQLException {
        Sql.value(connection, fence.select(kept.form("lease_guard") + "(?, ?)"), kept.name(), token());
    }

    /** One statement for all, in the order of the names, which is that of the locks. */
    static void beginGuarding(Connection connection, List<Holding> leases) throws SQLException {
        record Pair(String name, long token) {}
        List<Pair> pairs = leases.stream()
                .flatMap(lease -> lease.names().stream().map(name -> new Pair(name, lease.token())))
                .sorted((one, other) -> Sql.BY_BYTES.compare(one.name(), other.name()))
                .toList();
        String guard = leases.get(0).fence.named("lease_guard(x.name, x.token)");
        Sql.value(connection, "SELECT count(" + guard + ") FROM unnest(?, ?) AS x(name, token)",
                pairs.stream().map(Pair::name).toArray(String[]::new), pairs.stream().map(Pair::token).toArray(Long[]::new));
    }

    @Override
    void refuseIfOver() {
        check();
    }

    @Override
    boolean canMend(Throwable error) {
        return error instanceof NotSpeaking;
    }

    @Override
    boolean mend() {
        return renew().isPresent();
    }

    @Override
    void enter(Connection connection) {
        check();
        if (!keeper.enter(kept, connection)) {
            throw lost(null);
        }
    }

    @Override
    void leave(Connection connection) {
        keeper.leave(kept, connection);
    }

    @Override
    void beatSoon() {
        keeper.beatNow(kept);
    }

    @Override
    void pause() {
        keeper.pause(kept);
    }

    @Override
    void goOn() {
        keeper.goOn(kept);
    }

    @Override
    void releaseBy(Connection connection) throws SQLException {
        if (keeper.giveBack(connection, kept) == null) {
            keeper.lose(kept, Reason.GONE, null);
            throw lost(null);
        }
    }

    @Override
    void hasBeenReleased() {
        keeper.forget(kept);
    }
}
