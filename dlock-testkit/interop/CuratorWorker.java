// Takes a lock of Curator again and again, and prints when it held it, one line each:
// the kind (X exclusive, R shared, P permit) and the times of begin and end, in nanoseconds
// of the monotonic clock that all processes of the machine share.
//
// It begins when it reads a line.
//
//   java -cp 'jars/*' CuratorWorker.java HOST:PORT KIND PATH SECONDS
//
// KIND is mutex, read, write, or semaphore (of two permits).
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.framework.recipes.locks.InterProcessSemaphoreV2;
import org.apache.curator.framework.recipes.locks.Lease;
import org.apache.curator.retry.RetryNTimes;

public class CuratorWorker {
    public static void main(String[] arguments) throws Exception {
        String kind = arguments[1];
        String path = arguments[2];
        CuratorFramework client = CuratorFrameworkFactory.builder()
            .connectString(arguments[0])
            .sessionTimeoutMs(3000)
            .connectionTimeoutMs(4000)
            .retryPolicy(new RetryNTimes(20, 100))
            .build();
        client.start();
        InterProcessReadWriteLock both = new InterProcessReadWriteLock(client, path);
        InterProcessMutex mutex = switch (kind) {
            case "read" -> both.readLock();
            case "write" -> both.writeLock();
            default -> new InterProcessMutex(client, path);
        };
        InterProcessSemaphoreV2 semaphore = new InterProcessSemaphoreV2(client, path, 2);
        String letter = kind.equals("read") ? "R" : kind.equals("semaphore") ? "P" : "X";
        System.out.println("ready");
        System.in.read(); // all begin together
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.parseLong(arguments[3]));
        while (System.nanoTime() < end) {
            Lease lease = null;
            if (kind.equals("semaphore")) {
                lease = semaphore.acquire();
            } else {
                mutex.acquire();
            }
            long from = System.nanoTime();
            Thread.sleep(lease == null ? 1 : 10); // permits are to be held together
            System.out.println(letter + " " + from + " " + System.nanoTime());
            System.out.flush();
            if (lease != null) {
                semaphore.returnLease(lease);
            } else {
                mutex.release();
            }
        }
        client.close();
        System.out.println("done");
    }
}
