package pgfence;

import java.lang.ref.WeakReference;
import java.sql.Connection;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.function.Consumer;
import pgfence.FenceException.LeaseLost;

/**
 * What the {@link Keeper} knows of a lease. Its lock guards what changes. It knows the {@link Lease} that its holder has
 * only weakly, and so finds out when that was forgotten.
 */
final class Kept {
    final List<String> names;
    final long ttl;
    /** Between two renewals, and how long a call for it may take. */
    final long third;
    final List<Consumer<LeaseLost>> onLost;
    final Teller teller = new Teller();
    /** The connections that are in a transaction under it. */
    final Set<Connection> guarded = new HashSet<>();
    private final long holdAtMost;
    private final long holdAtLeast;

    volatile WeakReference<Lease> handle;
    volatile long token;
    volatile LeaseLost loss;
    /** That it is bound to. */
    Connection session;
    boolean isHeld;
    /** Its holder wants it to end. */
    boolean isEnding;
    boolean isForgotten;
    /** Its last renewal failed by itself: it is renewed alone, so that it holds up no other. */
    boolean isApart;
    boolean isBeating;
    /** It was asked for while another one was under way. */
    boolean beatsAgain;
    int pauses;
    long acquiredAt = Long.MIN_VALUE / 4;
    long deadline;
    long nextBeat;
    /** How many renewals were tried, and what the latest brought. */
    long beats;
    Long renewed;

    Kept(List<String> names, LeaseTerms<?> terms) {
        this.names = names;
        ttl = Clock.nanos(terms.ttl);
        third = ttl / 3;
        onLost = List.copyOf(terms.onLost);
        holdAtMost = terms.holdAtMost == null ? OwnConnection.NEVER : Clock.nanos(terms.holdAtMost);
        holdAtLeast = terms.holdAtLeast == null ? 0 : Clock.nanos(terms.holdAtLeast);
    }

    /** Whether it is to be renewed any more at all. */
    boolean isRenewed(long now) {
        return isHeld && !isEnding && !isForgotten && now - acquiredAt < holdAtMost;
    }

    /** Whether its holder has just now lost sight of it. */
    boolean becomesForgotten() {
        boolean becomes = !isForgotten && handle.get() == null;
        isForgotten |= becomes;
        return becomes;
    }

    /** When it is to be renewed next. */
    long beatsAt(long now) {
        return isRenewed(now) && pauses == 0 && !isBeating ? nextBeat : OwnConnection.NEVER;
    }

    /** How long it must stay taken yet, were it released now. */
    long mustStay() {
        return Math.max(0, acquiredAt + holdAtLeast - Clock.now());
    }

    boolean isOfSeveral() {
        return names.size() > 1;
    }

    /** The form of a function that takes its {@link #name}. */
    String form(String function) {
        return isOfSeveral() ? function + "_all" : function;
    }

    /** As an argument of SQL. */
    Object name() {
        return isOfSeveral() ? names.toArray(String[]::new) : names.get(0);
    }
}
