package pgfence;

import java.util.*;

/** Leases that are held, in the order in which their names were given. Closed, it gives back what is left of them. */
public final class Leases extends AbstractList<Lease> implements AutoCloseable {
    private final Keeper keeper;
    private final List<Lease> leases;

    Leases(Keeper keeper, List<Lease> leases) {
        this.keeper = keeper;
        this.leases = leases;
    }

    @Override public Lease get(int index) { return leases.get(index); }
    @Override public int size() { return leases.size(); }
    /** No error where one was lost: the work under it is told. */
    @Override
    public void close() { keeper.release(leases); }
}
