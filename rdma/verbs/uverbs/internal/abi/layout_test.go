package abi

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"srp-initiator/internal/require"
)

// structsByName gives every struct of the package its C name; fields are matched in order.
var structsByName = map[string]any{
	"ib_uverbs_ioctl_hdr":                IoctlHeader{},
	"ib_uverbs_attr":                     IoctlAttr{},
	"ib_uverbs_qp_cap":                   QPCap{},
	"ib_uverbs_query_port_resp_ex":       QueryPortRespEx{},
	"ib_uverbs_cmd_hdr":                  CmdHeader{},
	"ib_uverbs_ex_cmd_hdr":               ExCmdHeader{},
	"ib_uverbs_get_context":              GetContext{},
	"ib_uverbs_get_context_resp":         GetContextResp{},
	"ib_uverbs_query_device":             QueryDevice{},
	"ib_uverbs_query_device_resp":        QueryDeviceResp{},
	"ib_uverbs_query_port":               QueryPort{},
	"ib_uverbs_query_port_resp":          QueryPortResp{},
	"ib_uverbs_alloc_pd":                 AllocPD{},
	"ib_uverbs_alloc_pd_resp":            AllocPDResp{},
	"ib_uverbs_dealloc_pd":               DeallocPD{},
	"ib_uverbs_reg_mr":                   RegMR{},
	"ib_uverbs_reg_mr_resp":              RegMRResp{},
	"ib_uverbs_dereg_mr":                 DeregMR{},
	"ib_uverbs_alloc_mw":                 AllocMW{},
	"ib_uverbs_alloc_mw_resp":            AllocMWResp{},
	"ib_uverbs_dealloc_mw":               DeallocMW{},
	"ib_uverbs_create_comp_channel":      CreateCompChannel{},
	"ib_uverbs_create_comp_channel_resp": CreateCompChannelResp{},
	"ib_uverbs_create_cq":                CreateCQ{},
	"ib_uverbs_create_cq_resp":           CreateCQResp{},
	"ib_uverbs_req_notify_cq":            ReqNotifyCQ{},
	"ib_uverbs_destroy_cq":               DestroyCQ{},
	"ib_uverbs_destroy_cq_resp":          DestroyCQResp{},
	"ib_uverbs_create_qp":                CreateQP{},
	"ib_uverbs_create_qp_resp":           CreateQPResp{},
	"ib_uverbs_qp_dest":                  QPDest{},
	"ib_uverbs_modify_qp":                ModifyQP{},
	"ib_uverbs_destroy_qp":               DestroyQP{},
	"ib_uverbs_destroy_qp_resp":          DestroyQPResp{},
	"ib_uverbs_post_send":                PostSend{},
	"ib_uverbs_post_send_resp":           PostSendResp{},
	"ib_uverbs_comp_event_desc":          CompEventDesc{},
	"ib_uverbs_async_event_desc":         AsyncEventDesc{},
	"ib_uverbs_wc":                       WC{},
	"rxe_sge":                            RXESGE{},
	"mminfo":                             RXEMMInfo{},
	"rxe_dma_info":                       RXEDMAInfo{},
	"rxe_send_wr":                        RXESendWR{},
	"rxe_send_wr.wr.rdma":                RXERDMA{},
	"rxe_send_wr.wr.mw":                  RXEMW{},
	"rxe_send_wqe":                       RXESendWQE{},
	"rxe_recv_wqe":                       RXERecvWQE{},
	"rxe_create_cq_resp":                 RXECreateCQResp{},
	"rxe_create_qp_resp":                 RXECreateQPResp{},
	"rxe_queue_buf":                      RXEQueueBuf{},
	"mlx5_ib_alloc_ucontext_req_v2":      MLX5GetContext{},
	"mlx5_ib_alloc_ucontext_resp":        MLX5GetContextResp{},
	"mlx5_ib_alloc_pd_resp":              MLX5AllocPDResp{},
	"mlx5_ib_create_cq":                  MLX5CreateCQ{},
	"mlx5_ib_create_cq_resp":             MLX5CreateCQResp{},
	"mlx5_ib_create_qp":                  MLX5CreateQP{},
	"mlx5_ib_create_qp_resp":             MLX5CreateQPResp{},
	"mlx4_ib_alloc_ucontext_resp":        MLX4GetContextResp{},
	"mlx4_ib_alloc_ucontext_resp_v3":     MLX4GetContextRespV3{},
	"mlx4_ib_alloc_pd_resp":              MLX4AllocPDResp{},
	"mlx4_ib_create_cq":                  MLX4CreateCQ{},
	"mlx4_ib_create_cq_resp":             MLX4CreateCQResp{},
	"mlx4_ib_create_qp":                  MLX4CreateQP{},
}

// constants gives every number of the package its C name.
var constants = map[string]uint64{
	"RDMA_VERBS_IOCTL":                         IoctlNumber,
	"IB_USER_VERBS_ABI_VERSION":                Version,
	"RDMA_DRIVER_MLX5":                         DriverMLX5,
	"RDMA_DRIVER_MLX4":                         DriverMLX4,
	"RDMA_DRIVER_RXE":                          DriverRXE,
	"UVERBS_ATTR_F_MANDATORY":                  AttrMandatory,
	"UVERBS_ATTR_F_VALID_OUTPUT":               AttrValidOutput,
	"UVERBS_OBJECT_DEVICE":                     ObjectDevice,
	"UVERBS_OBJECT_PD":                         ObjectPD,
	"UVERBS_OBJECT_CQ":                         ObjectCQ,
	"UVERBS_OBJECT_QP":                         ObjectQP,
	"UVERBS_OBJECT_MR":                         ObjectMR,
	"UVERBS_OBJECT_MW":                         ObjectMW,
	"UVERBS_OBJECT_ASYNC_EVENT":                ObjectAsyncEvent,
	"UVERBS_ATTR_UHW_IN":                       AttrDriverIn,
	"UVERBS_ATTR_UHW_OUT":                      AttrDriverOut,
	"UVERBS_METHOD_INVOKE_WRITE":               MethodInvokeWrite,
	"UVERBS_ATTR_CORE_IN":                      AttrCoreIn,
	"UVERBS_ATTR_CORE_OUT":                     AttrCoreOut,
	"UVERBS_ATTR_WRITE_CMD":                    AttrWriteCommand,
	"UVERBS_METHOD_QUERY_PORT":                 MethodQueryPort,
	"UVERBS_ATTR_QUERY_PORT_PORT_NUM":          AttrQueryPortNum,
	"UVERBS_ATTR_QUERY_PORT_RESP":              AttrQueryPortResp,
	"UVERBS_METHOD_GET_CONTEXT":                MethodGetContext,
	"UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS": AttrNumCompVectors,
	"UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT":     AttrCoreSupport,
	"UVERBS_METHOD_CQ_CREATE":                  MethodCQCreate,
	"UVERBS_ATTR_CREATE_CQ_HANDLE":             AttrCreateCQHandle,
	"UVERBS_ATTR_CREATE_CQ_CQE":                AttrCreateCQCQE,
	"UVERBS_ATTR_CREATE_CQ_USER_HANDLE":        AttrCreateCQUserHandle,
	"UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL":       AttrCreateCQCompChannel,
	"UVERBS_ATTR_CREATE_CQ_COMP_VECTOR":        AttrCreateCQCompVector,
	"UVERBS_ATTR_CREATE_CQ_FLAGS":              AttrCreateCQFlags,
	"UVERBS_ATTR_CREATE_CQ_RESP_CQE":           AttrCreateCQRespCQE,
	"UVERBS_ATTR_CREATE_CQ_EVENT_FD":           AttrCreateCQEventFD,
	"UVERBS_METHOD_CQ_DESTROY":                 MethodCQDestroy,
	"UVERBS_ATTR_DESTROY_CQ_HANDLE":            AttrDestroyCQHandle,
	"UVERBS_ATTR_DESTROY_CQ_RESP":              AttrDestroyCQResp,
	"UVERBS_METHOD_QP_CREATE":                  MethodQPCreate,
	"UVERBS_ATTR_CREATE_QP_HANDLE":             AttrCreateQPHandle,
	"UVERBS_ATTR_CREATE_QP_PD_HANDLE":          AttrCreateQPPDHandle,
	"UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE":     AttrCreateQPSendCQHandle,
	"UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE":     AttrCreateQPRecvCQHandle,
	"UVERBS_ATTR_CREATE_QP_USER_HANDLE":        AttrCreateQPUserHandle,
	"UVERBS_ATTR_CREATE_QP_CAP":                AttrCreateQPCap,
	"UVERBS_ATTR_CREATE_QP_TYPE":               AttrCreateQPType,
	"UVERBS_ATTR_CREATE_QP_FLAGS":              AttrCreateQPFlags,
	"UVERBS_ATTR_CREATE_QP_EVENT_FD":           AttrCreateQPEventFD,
	"UVERBS_ATTR_CREATE_QP_RESP_CAP":           AttrCreateQPRespCap,
	"UVERBS_ATTR_CREATE_QP_RESP_QP_NUM":        AttrCreateQPRespQPNum,
	"UVERBS_METHOD_QP_DESTROY":                 MethodQPDestroy,
	"UVERBS_ATTR_DESTROY_QP_HANDLE":            AttrDestroyQPHandle,
	"UVERBS_ATTR_DESTROY_QP_RESP":              AttrDestroyQPResp,
	"UVERBS_METHOD_PD_DESTROY":                 MethodPDDestroy,
	"UVERBS_ATTR_DESTROY_PD_HANDLE":            AttrDestroyPDHandle,
	"UVERBS_METHOD_MR_DESTROY":                 MethodMRDestroy,
	"UVERBS_ATTR_DESTROY_MR_HANDLE":            AttrDestroyMRHandle,
	"UVERBS_METHOD_MW_DESTROY":                 MethodMWDestroy,
	"UVERBS_ATTR_DESTROY_MW_HANDLE":            AttrDestroyMWHandle,
	"UVERBS_METHOD_ASYNC_EVENT_ALLOC":          MethodAsyncEventAlloc,
	"UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE":  AttrAsyncEventFD,
	"IB_USER_VERBS_CMD_GET_CONTEXT":            CmdGetContext,
	"IB_USER_VERBS_CMD_QUERY_DEVICE":           CmdQueryDevice,
	"IB_USER_VERBS_CMD_QUERY_PORT":             CmdQueryPort,
	"IB_USER_VERBS_CMD_ALLOC_PD":               CmdAllocPD,
	"IB_USER_VERBS_CMD_DEALLOC_PD":             CmdDeallocPD,
	"IB_USER_VERBS_CMD_REG_MR":                 CmdRegMR,
	"IB_USER_VERBS_CMD_DEREG_MR":               CmdDeregMR,
	"IB_USER_VERBS_CMD_ALLOC_MW":               CmdAllocMW,
	"IB_USER_VERBS_CMD_DEALLOC_MW":             CmdDeallocMW,
	"IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL":    CmdCreateCompChannel,
	"IB_USER_VERBS_CMD_CREATE_CQ":              CmdCreateCQ,
	"IB_USER_VERBS_CMD_DESTROY_CQ":             CmdDestroyCQ,
	"IB_USER_VERBS_CMD_REQ_NOTIFY_CQ":          CmdReqNotifyCQ,
	"IB_USER_VERBS_CMD_CREATE_QP":              CmdCreateQP,
	"IB_USER_VERBS_CMD_MODIFY_QP":              CmdModifyQP,
	"IB_USER_VERBS_CMD_DESTROY_QP":             CmdDestroyQP,
	"IB_USER_VERBS_CMD_POST_SEND":              CmdPostSend,
	"IB_USER_VERBS_CMD_FLAG_EXTENDED":          CmdExtended,
	"IB_UVERBS_QPT_RC":                         QPTypeRC,
	"IB_UVERBS_QP_CREATE_SQ_SIG_ALL":           QPFlagSQSigAll,
	"IB_UVERBS_DEVICE_MEM_WINDOW":              DeviceMemWindow,
	"IB_UVERBS_DEVICE_MEM_MGT_EXTENSIONS":      DeviceMemMgtExt,
	"IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2A":      DeviceMemWindowType2A,
	"IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2B":      DeviceMemWindowType2B,
	"sizeof(struct ib_uverbs_send_wr)":         SendWRSize,

	"MLX5_IB_UVERBS_ABI_VERSION":             MLX5Version,
	"MLX4_IB_UVERBS_ABI_VERSION":             MLX4Version,
	"MLX4_IB_UVERBS_NO_DEV_CAPS_ABI_VERSION": MLX4VersionV3,
	"MLX5_IB_ALLOC_UCTX_DEVX":                MLX5ContextDEVX,
	"MLX5_LIB_CAP_4K_UAR":                    MLX5Lib4KUAR,
	"MLX5_LIB_CAP_DYN_UAR":                   MLX5LibDynUAR,
	"MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE":   MLX5RespECE,
	"MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX": MLX5CQUARPageIndex,
	"MLX5_QP_FLAG_SCATTER_CQE":               MLX5QPScatterCQE,
	"MLX5_QP_FLAG_UAR_PAGE_INDEX":            MLX5QPUARPageIndex,
	"MLX4_USER_DEV_CAP_LARGE_CQE":            MLX4UserDevCapCQESize,
	"MLX5_IB_OBJECT_UAR":                     ObjectMLX5UAR,
	"MLX5_IB_METHOD_UAR_OBJ_ALLOC":           MethodMLX5UARAlloc,
	"MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE":      AttrMLX5UARAllocHandle,
	"MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE":        AttrMLX5UARAllocType,
	"MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET": AttrMLX5UARAllocOffset,
	"MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH": AttrMLX5UARAllocLength,
	"MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID":     AttrMLX5UARAllocPageID,
	"MLX5_IB_METHOD_UAR_OBJ_DESTROY":         MethodMLX5UARDestroy,
	"MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE":    AttrMLX5UARDestroyHandle,
	"MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF":         MLX5UARBlueFlame,
	"MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC":         MLX5UARNoCache,
}

// TestLayout holds this package to the layout that the kernel's headers have.
func TestLayout(t *testing.T) {
	golden, err := os.ReadFile("testdata/layout.txt")
	if err != nil {
		t.Fatal(err)
	}
	checked := map[string]bool{}
	var typ reflect.Type
	next := 0 // field of typ
	finish := func() {
		if typ != nil && next != typ.NumField() {
			t.Errorf("%s: the headers know nothing of field %s and after", typ, typ.Field(next).Name)
		}
	}
	for _, l := range strings.Split(strings.TrimSpace(string(golden)), "\n") {
		f := strings.Fields(l)
		kind, name, numbers := f[0], strings.Join(f[1:len(f)-1], " "), f[len(f)-1:]
		if kind == "field" {
			name, numbers = f[1], f[2:]
		}
		switch kind {
		case "struct":
			finish()
			v, ok := structsByName[name]
			if !ok {
				t.Fatalf("the layout knows struct %s, this test does not", name)
			}
			checked[name] = true
			typ, next = reflect.TypeOf(v), 0
			if fmt.Sprint(typ.Size()) != numbers[0] {
				t.Errorf("%s has %d bytes, struct %s has %s", typ, typ.Size(), name, numbers[0])
			}
			// structs.HostLayout comes first and takes no room.
			if typ.Field(0).Type.String() != "structs.HostLayout" {
				t.Errorf("%s does not begin with structs.HostLayout", typ)
			}
			next = 1
		case "field":
			if next >= typ.NumField() {
				t.Errorf("%s lacks field %s", typ, name)
				continue
			}
			g := typ.Field(next)
			next++
			if got := fmt.Sprintf("%d %d", g.Offset, g.Type.Size()); got != strings.Join(numbers, " ") {
				t.Errorf("%s.%s has offset and size %s, %s has %s", typ, g.Name, got, name, strings.Join(numbers, " "))
			}
			if !sameName(g.Name, name[strings.LastIndex(name, ".")+1:]) {
				t.Errorf("%s.%s stands where the headers have %s", typ, g.Name, name)
			}
		case "const":
			v, ok := constants[name]
			if !ok {
				t.Fatalf("the layout knows constant %s, this test does not", name)
			}
			checked[name] = true
			if fmt.Sprint(v) != numbers[0] {
				t.Errorf("%s is %d here, %s in the headers", name, v, numbers[0])
			}
		default:
			t.Fatalf("line %q", l)
		}
	}
	finish()
	for name := range structsByName {
		if !checked[name] {
			t.Errorf("struct %s is not in the layout", name)
		}
	}
	for name := range constants {
		if !checked[name] {
			t.Errorf("constant %s is not in the layout", name)
		}
	}
}

// renamed are fields whose Go name is not the C name in other letters.
var renamed = map[string]string{"Reserved": "cmd_hdr_reserved attr_data reserved1", "Legacy": "legacy_resp"}

func sameName(goName, cName string) bool {
	fold := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "_", "")) }
	if fold(goName) == fold(cName) {
		return true
	}
	for _, n := range strings.Fields(renamed[goName]) {
		if n == cName {
			return true
		}
	}
	return false
}

// TestLayoutIsTheHeaders makes the layout anew from the headers of this machine.
func TestLayoutIsTheHeaders(t *testing.T) {
	gcc := require.Program(t, "gcc")
	if _, err := os.Stat("/usr/include/rdma/ib_user_verbs.h"); err != nil {
		require.Missing(t, "the kernel's RDMA headers (Debian package linux-libc-dev)")
	}
	prog := filepath.Join(t.TempDir(), "layout")
	if out, err := exec.Command(gcc, "-Wall", "-o", prog, "testdata/layout.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	got, err := exec.Command(prog).Output()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/layout.txt")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		g, w := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
		for i := range w {
			if i >= len(g) || g[i] != w[i] {
				t.Fatalf("testdata/layout.txt says %q, the headers say %q", w[i], append(g, "")[min(i, len(g))])
			}
		}
		t.Fatalf("testdata/layout.txt has %d lines, the headers give %d", len(w), len(g))
	}
}
