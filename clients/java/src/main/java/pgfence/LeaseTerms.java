package pgfence;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.function.Consumer;
import pgfence.FenceException.LeaseLost;

/** The terms on which leases are asked for: of {@link LeaseRequest} and {@link ClaimRequest}. */
public abstract sealed class LeaseTerms<T extends LeaseTerms<T>> permits LeaseRequest, ClaimRequest {
    private static final Duration SHORTEST = Duration.ofMillis(100);

    final Fence fence;
    Duration ttl = Duration.ofSeconds(30);
    /** Null: a text that is unique for each acquire. */
    String holder;
    String metadata;
    boolean shared;
    int slots = 1;
    Duration holdAtMost;
    Duration holdAtLeast;
    final List<Consumer<LeaseLost>> onLost = new ArrayList<>();

    LeaseTerms(Fence fence) {
        this.fence = fence;
    }

    @SuppressWarnings("unchecked")
    final T self() {
        return (T) this;
    }

    /** How long it is held without a renewal: 30 s, where nothing else is said; at least 100 ms. */
    public final T ttl(Duration ttl) {
        this.ttl = checked(ttl);
        return self();
    }

    /** Who has it, for the view of all leases, in place of a text that is unique for each acquire. */
    public final T holder(String holder) {
        this.holder = Objects.requireNonNull(holder, "holder");
        return self();
    }

    /** An object of JSON, to be shown in the view of all leases. */
    public final T metadata(String json) {
        metadata = json;
        return self();
    }

    /** Others may have it shared at the same time. */
    public final T shared() {
        shared = true;
        return self();
    }

    /** How many may have it at the same time. */
    public final T slots(int slots) {
        this.slots = slots;
        return self();
    }

    /**
     * After this span it is renewed no more, and lost at its deadline: for work that may get stuck.
     *
     * @param span from the acquire
     */
    public final T holdAtMost(Duration span) {
        holdAtMost = positive("holdAtMost", span);
        return self();
    }

    /**
     * A release before this span has passed leaves it taken until then: for schedulers whose clocks differ.
     *
     * @param span from the acquire
     */
    public final T holdAtLeast(Duration span) {
        holdAtLeast = positive("holdAtLeast", span);
        return self();
    }

    /** Told of a loss, from another thread, at the deadline at the latest; called once. */
    public final T onLost(Consumer<LeaseLost> tell) {
        onLost.add(Objects.requireNonNull(tell, "onLost"));
        return self();
    }

    static Duration checked(Duration ttl) {
        if (ttl.compareTo(SHORTEST) < 0) {
            throw new IllegalArgumentException("a ttl of " + ttl.toMillis() + " ms: it takes at least 100 ms");
        }
        return ttl;
    }

    static Duration positive(String what, Duration span) {
        if (span.isNegative() || span.isZero()) {
            throw new IllegalArgumentException(what + " takes a span that is longer than nothing");
        }
        return span;
    }
}
