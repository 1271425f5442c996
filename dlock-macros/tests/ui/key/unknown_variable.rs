use dlock::key;

fn main() {
    let _ = key!("order:{order_id}");
}
