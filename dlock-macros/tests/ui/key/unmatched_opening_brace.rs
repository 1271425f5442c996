use dlock::key;

fn main() {
    let order_id = 7;
    let _ = key!("order:{order_id");
}
