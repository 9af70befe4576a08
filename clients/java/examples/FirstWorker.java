import java.sql.DriverManager;
import java.time.Duration;
import pgfence.Fence;
import pgfence.FenceException.*;

class FirstWorker {
    public static void main(String[] args) throws Exception {
        var fence = new Fence(args[0]);
        try (var lease = fence.lease("order:7").ttl(Duration.ofSeconds(30)).acquire();
                var connection = DriverManager.getConnection("jdbc:" + args[0])) {
            System.out.println("order:7 is ours, under token " + lease.token());
            lease.sleep(Duration.ofSeconds(3)); // whatever takes long: a heartbeat keeps the lease meanwhile
            var pay = connection.prepareStatement("UPDATE orders SET status = 'paid' WHERE id = 7");
            lease.guard(connection).run(c -> pay.executeUpdate());
            System.out.println("order:7 is paid");
        } catch (LeaseTaken taken) {
            System.out.println("refused, another worker is at it: " + taken.getMessage());
        } catch (LeaseLost lost) {
            System.out.println("stop, and report no failure: " + lost.getMessage());
        }
    }
}
